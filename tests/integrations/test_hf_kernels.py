"""Forwards that the kernels library has set, and opfuser's layers for that library."""

from __future__ import annotations

import copy
import enum
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import hf
from opfuser.applying import report
from tests.applying.models import assert_as_exact, assert_equal_steps, inputs_of, llama, step

PATHS = ("layers.1.input_layernorm", "layers.2.mlp")


class Kernel(nn.Module):
    """A layer as in a repository of kernels: nothing but a forward, here of three times as much."""

    can_torch_compile = True

    def forward(self: Any, hidden_states: Tensor) -> Any:
        return 3 * type(self).forward(self, hidden_states)


class Opaque(nn.Module):
    """One that reads the numbers of its input, which nothing but a real call has."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        assert hidden_states.sum().item() == hidden_states.sum().item()
        return 3 * type(self).forward(self, hidden_states)


def kernelized(model: nn.Module, layer: type[nn.Module]) -> nn.Module:
    """What the library's kernelize does to modules."""
    for path in PATHS:
        module: Any = model.get_submodule(path)
        module.forward = types.MethodType(layer.forward, module)
    return model


@pytest.mark.parametrize("layer", [Kernel, Opaque])
@pytest.mark.parametrize("when", ["before", "after", "before and after a revert"])
def test_kernels_of_others_stay(layer: type[nn.Module], when: str) -> None:
    plain = step(llama())
    want = step(kernelized(llama(), layer))
    model = llama()
    if when != "after":
        kernelized(model, layer)
    opfuser.apply(model)
    if when == "after":
        assert_equal_steps(step(model), plain)
        kernelized(model, layer)
    assert_equal_steps(step(model), want)
    assert_equal_steps(step(model), want)
    if layer is Opaque:
        kept = {e.path: e.reason for e in report(model).kept}
        for path in PATHS:
            assert kept[path] == f"has a forward of its own, {__name__}.Opaque.forward"
    opfuser.revert(model)
    assert_equal_steps(step(model), want)
    for path in PATHS:
        forward: Any = model.get_submodule(path).forward
        assert forward.__func__ is layer.forward


class Mode(enum.Flag):
    """Those of the library that opfuser's layers are for."""

    TRAINING = enum.auto()
    INFERENCE = enum.auto()
    TORCH_COMPILE = enum.auto()


def ours(model: nn.Module) -> nn.Module:
    """The model with opfuser's layers, which the library gives modules in the same way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "kernels", types.SimpleNamespace(Mode=Mode))
        mapping = hf.kernel_mapping()
    for module in model.modules():
        for kind, name in (("RMSNorm", "RMSNorm"), ("MLP", "SwiGLUMLP")):
            if type(module).__name__.endswith(kind):
                mode = Mode.TRAINING if module.training else Mode.INFERENCE
                layer = mapping[name]["cpu"][mode].load()
                module.forward = types.MethodType(layer.forward, module)
    return model


@pytest.mark.parametrize("training", [True, False])
def test_our_layers_compute_what_they_replace(training: bool) -> None:
    model = ours(llama().train(training))
    assert_equal_steps(step(model), step(llama().train(training)))
    found = {e.path: e.operations for e in report(model).computed}
    assert found["layers.1.mlp"] == "MergedLinear x2, Gated, Linear"
    assert found["norm"] == "Norm"
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.1)
    plain = llama().train(training)
    plain.load_state_dict(twin.state_dict())
    assert_equal_steps(step(twin), step(plain))
    assert_equal_steps(step(model), step(llama().train(training)))
    changed = llama().train(training)
    both: list[Any] = [*model.modules(), *changed.modules()]
    for module in both:
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
    assert_equal_steps(step(model), step(changed))


def test_our_layers_in_bf16_are_as_exact_as_torch() -> None:
    exact, plain = llama(), llama().bfloat16()
    exact.load_state_dict(plain.state_dict())
    model = ours(copy.deepcopy(plain))
    assert_as_exact(step(model), step(plain), step(exact), floor=1e-9)


def test_apply_reads_through_our_layers() -> None:
    model = ours(llama())
    want = step(llama())
    told = opfuser.apply(model, example=inputs_of(model))
    assert [e.path for e in told.computed] == ["layers.0", "layers.1", "layers.2", "norm"]
    assert_equal_steps(step(model), want)
    opfuser.revert(model)
    assert_equal_steps(step(model), want)
    assert {e.path for e in report(model).computed} >= {"norm", "layers.0.mlp"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_our_layers_leave_compiled_calls_to_the_class() -> None:
    torch.compiler.reset()
    model: Any = ours(llama().eval())
    norm, x = model.norm, torch.randn(2, 3, 32, dtype=torch.float64)
    compiled: Callable[[Tensor], Tensor] = torch.compile(norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), type(norm).forward(norm, x))


def test_kernelize_takes_our_mapping() -> None:
    kernels = pytest.importorskip("kernels", reason="the kernels library is not installed")
    model: Any = llama()
    kinds = type(model.norm), type(model.layers[0].mlp)
    for kind, name in zip(kinds, ("RMSNorm", "SwiGLUMLP")):
        kernels.replace_kernel_forward_from_hub(kind, name)
    want = step(model)
    try:
        for mode in (kernels.Mode.TRAINING, kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE):
            with kernels.use_kernel_mapping(hf.kernel_mapping(), inherit_mapping=False):
                kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
            assert_equal_steps(step(model), want)
            assert {e.path for e in report(model).computed} >= {"norm", "layers.0.mlp"}
    finally:
        for kind in kinds:
            del kind.kernel_layer_name, kind.kernel_condition

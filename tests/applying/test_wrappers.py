"""Libraries that wrap a model, or move its parameters between calls, in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.applying import decisions, report

from .models import assert_equal_steps, llama, paths, step

transformers = pytest.importorskip("transformers")


def renewed(model: Any) -> None:
    """Each layer has other parameters in each call."""

    def renew(layer: nn.Module, args: Any) -> None:
        for module in layer.modules():
            for name, p in [*module._parameters.items()]:
                if p is not None and p.grad is None:
                    setattr(module, name, nn.Parameter(p.detach().clone()))

    for layer in model.layers:
        layer.register_forward_pre_hook(renew)


def gathered(of: Callable[[Any], list[nn.Module]]) -> Callable[[Any], None]:
    """Modules whose parameters are empty but for the time of their passes, as in ZeRO-3."""

    def wrap(model: Any) -> None:
        whole: dict[nn.Parameter, Tensor] = {}

        def gather(module: nn.Module, *others: Any) -> None:
            for p in module.parameters():
                p.data = whole.pop(p, p.data)

        def release(module: nn.Module, *others: Any) -> None:
            for p in module.parameters():
                whole[p], p.data = p.data, p.new_empty(0)

        for module in of(model):
            module.register_forward_pre_hook(gather)
            module.register_forward_hook(release)
            module.register_full_backward_pre_hook(gather)
            release(module)

    return wrap


def projections(model: Any) -> list[nn.Module]:
    return [m for m in model.layers.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize(
    ("wrap", "computed"),
    [
        (renewed, "layers.0"),
        (gathered(lambda model: [*model.layers]), "layers.0"),
        (gathered(projections), "layers.0.input_layernorm"),
    ],
)
def test_parameters_that_come_and_go(wrap: Any, computed: str) -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    for m in (model, plain):
        wrap(m)
    for number in range(20):
        with mock.patch.object(decisions, "trace", wraps=decisions.trace) as traced:
            got = step(model)
        assert traced.call_count == 0 or number == 0
        if number % 5 == 0:
            assert_equal_steps(got, step(plain))
    assert computed in paths(report(model))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_that_accelerate_prepares(precision: str) -> None:
    """In half precision it sets another forward, which calls the one of apply."""
    accelerate = pytest.importorskip("accelerate")
    steps = []
    for when in ("never", "before", "after"):
        accelerate.state.AcceleratorState._reset_state(True)
        model = llama().float()
        if when == "before":
            opfuser.apply(model)
        model = accelerate.Accelerator(cpu=True, mixed_precision=precision).prepare(model)
        if when == "after":
            opfuser.apply(model)
        steps = [step(model), *steps]
        if when != "never":
            assert {"layers.0.mlp", "layers.0"} & set(paths(report(model)))
            assert_equal_steps(steps[0], steps[-1], 1e-4 if precision == "no" else 0.05)


def test_weights_in_one_storage_in_checkpoints_of_accelerate(tmp_path: Path) -> None:
    """Written as docs/limits.md says: its safetensors files would have only one of the weights."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    model, plain = accelerator.prepare(llama()), llama()
    opfuser.apply(model, merge_storages=True)
    wanted = step(plain)
    assert_equal_steps(step(model), wanted)
    attention = model.layers[0].self_attn
    q, k = attention.q_proj.weight, attention.k_proj.weight
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    accelerator.save_state(tmp_path, safe_serialization=False)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    accelerator.load_state(tmp_path)
    assert_equal_steps(step(model), wanted)

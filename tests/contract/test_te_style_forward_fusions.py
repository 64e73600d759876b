"""Forward fusions written for te.ops: they fill the contexts, and backward stays unfused.

The layouts that they fill are public: BasicLinear ``(input, weight)``, Bias nothing, activations
``(input,)``, RMSNorm ``(input, rstd)``, LayerNorm ``(input, mean, rstd)``. Norms written for te.ops
save their input with all rows flattened into one dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import opfuser as te_ops
from opfuser import FusedOperation
from tests.contract.te_style_forward import (
    ForwardLayerNormSwiGLU,
    ForwardLinearBiasGELU,
    ForwardLinearSiLU,
    ForwardMakeLinear,
    ForwardRMSNormLinear,
)
from tests.hazards.tensors import close, fill, leaf, rand

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True)
def _only_these_fusions() -> Iterator[None]:
    """Backward must be unfused, and no forward fusion of ours may come first."""
    ours = [info.name for info in te_ops.fusions()]
    ForwardLinearSiLU.enabled = True
    with te_ops.disable(*ours):
        yield


def check(
    model: te_ops.Sequential, fused: type, reference: Any, x: torch.Tensor, *, index: int = 0
) -> None:
    """Runs the model, which must have used ``fused``, and compares all gradients."""
    y = model(x)
    fuser = model._module_groups[0]
    assert isinstance(fuser._forward_ops[index][0], fused)
    assert not any(isinstance(op, FusedOperation) for op, _ in fuser._backward_ops)
    compare(model, y, reference, x)


def compare(model: te_ops.Sequential, y: Any, reference: Any, x: torch.Tensor) -> None:
    """Backward from all outputs; compares outputs and gradients with those of the reference."""
    outputs = y if isinstance(y, tuple) else (y,)
    grads = [rand(*out.shape, dtype=x.dtype) for out in outputs]
    torch.autograd.backward(outputs, grads)
    x64, tensors = leaf(x), {name: leaf(p) for name, p in model.named_parameters()}
    wants = reference(x64, tensors)
    wants = wants if isinstance(wants, tuple) else (wants,)
    torch.autograd.backward(wants, [g.double() for g in grads])
    pairs = [*zip(outputs, wants), (x.grad, x64.grad)]
    pairs += [(p.grad, tensors[name].grad) for name, p in model.named_parameters()]
    for got, want in pairs:
        scale = max(1.0, want.abs().max().item())
        close(got.double() / scale, want / scale, TOLERANCE[x.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prepend", [False, True])
def test_linear_silu(dtype: torch.dtype, prepend: bool) -> None:
    model = fill(te_ops.Sequential(te_ops.Linear(16, 8, bias=False, dtype=dtype), te_ops.SiLU()))
    x = rand(5, 16, dtype=dtype, grad=True)
    with te_ops.register_forward_fusion(ForwardLinearSiLU.fuse_ops, prepend=prepend):
        check(model, ForwardLinearSiLU, lambda x, p: F.silu(F.linear(x, p["0.weight"])), x)


def test_one_shot_fusion_stays_in_the_plan_that_it_was_made_for() -> None:
    model = fill(te_ops.Sequential(te_ops.Linear(16, 8, bias=False), te_ops.SiLU()))
    x = rand(5, 16, dtype=torch.float32, grad=True)
    with te_ops.register_forward_fusion(ForwardLinearSiLU.fuse_ops):
        for _ in range(3):
            x.grad = None
            model.zero_grad()
            check(model, ForwardLinearSiLU, lambda x, p: F.silu(F.linear(x, p["0.weight"])), x)
        # No further plan was asked for, so the one-shot flag is still down, and nothing is fused.
        other = te_ops.Sequential(te_ops.Linear(16, 8, bias=False), te_ops.SiLU())
        other(x)
        assert [type(op) for op, _ in other._module_groups[0]._forward_ops] == [
            te_ops.BasicLinear,
            te_ops.SiLU,
        ]


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_flags_of_the_context_do_not_decide_which_gradients_are_made(
    needs: tuple[bool, bool],
) -> None:
    """The fusion claims ``input_requires_grad``, whatever is needed: the plan knows better."""
    model = fill(te_ops.Sequential(te_ops.Linear(16, 8, bias=False), te_ops.SiLU()))
    x = rand(5, 16, dtype=torch.float32, grad=needs[0])
    model[0].weight.requires_grad_(needs[1])
    with te_ops.register_forward_fusion(ForwardLinearSiLU.fuse_ops):
        y = model(x)
    assert y.requires_grad == any(needs)
    x64, w = leaf(x), leaf(model[0].weight)
    want = F.silu(F.linear(x64, w))
    close(y, want, 1e-5)
    if y.requires_grad:
        y.backward(torch.ones_like(y))
        want.backward(torch.ones_like(want))
    for got, expected, needed in zip((x, model[0].weight), (x64, w), needs):
        if needed:
            close(got.grad, expected.grad, 1e-4)
        else:
            assert got.grad is None


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("flatten", [True, False])
def test_rmsnorm_linear(dtype: torch.dtype, rows: tuple[int, ...], flatten: bool) -> None:
    model = te_ops.Sequential(
        te_ops.RMSNorm(16, dtype=dtype), te_ops.Linear(16, 8, bias=False, dtype=dtype)
    )
    ForwardRMSNormLinear.flatten = flatten
    with te_ops.register_forward_fusion(ForwardRMSNormLinear.fuse_ops):
        check(
            fill(model),
            ForwardRMSNormLinear,
            lambda x, p: F.linear(F.rms_norm(x, (16,), p["0.weight"], 1e-5), p["1.weight"]),
            rand(*rows, 16, dtype=dtype, grad=True),
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("flatten", [True, False])
def test_layernorm_swiglu(dtype: torch.dtype, rows: tuple[int, ...], flatten: bool) -> None:
    model = te_ops.Sequential(te_ops.Identity(), te_ops.LayerNorm(16, dtype=dtype), te_ops.SwiGLU())

    def reference(x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
        a, b = F.layer_norm(x, (16,), p["1.weight"], p["1.bias"], 1e-5).chunk(2, -1)
        return F.silu(a) * b

    ForwardLayerNormSwiGLU.flatten = flatten
    with te_ops.register_forward_fusion(ForwardLayerNormSwiGLU.fuse_ops):
        x = rand(*rows, 16, dtype=dtype, grad=True)
        check(fill(model), ForwardLayerNormSwiGLU, reference, x, index=1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=str)
def test_linear_bias_gelu(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    model = te_ops.Sequential(te_ops.Linear(16, 8, dtype=dtype), te_ops.GELU())
    with te_ops.register_forward_fusion(ForwardLinearBiasGELU.fuse_ops):
        check(
            fill(model),
            ForwardLinearBiasGELU,
            lambda x, p: F.gelu(F.linear(x, p["0.weight"], p["0.bias"]), approximate="tanh"),
            rand(*rows, 16, dtype=dtype, grad=True),
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_extra_output_inside_a_window(dtype: torch.dtype) -> None:
    linear = te_ops.Linear(16, 8, bias=False, dtype=dtype)
    model = te_ops.Sequential(te_ops.SiLU(), te_ops.MakeExtraOutput(), linear)
    with te_ops.register_forward_fusion(ForwardMakeLinear.fuse_ops):
        check(
            fill(model),
            ForwardMakeLinear,
            lambda x, p: (F.linear(F.silu(x), p["2.weight"]), F.silu(x)),
            rand(5, 16, dtype=dtype, grad=True),
            index=1,
        )


def test_a_step_may_span_the_first_operation_that_needs_a_gradient() -> None:
    """The norm is frozen and the input needs nothing: only the linear's context is to be filled."""
    model = fill(te_ops.Sequential(te_ops.RMSNorm(16), te_ops.Linear(16, 8, bias=False)))
    model[0].requires_grad_(False)
    x = rand(5, 16, dtype=torch.float32)
    ForwardRMSNormLinear.flatten = True
    with te_ops.register_forward_fusion(ForwardRMSNormLinear.fuse_ops):
        y = model(x)
        y.backward(torch.ones_like(y))
        ((op, indices),) = model._module_groups[0]._forward_ops
    assert isinstance(op, ForwardRMSNormLinear)
    assert indices == [0, 1]
    w = leaf(model[1].weight)
    F.linear(F.rms_norm(x.double(), (16,), model[0].weight.double(), 1e-5), w).sum().backward()
    close(model[1].weight.grad, w.grad, 1e-4)
    assert model[0].weight.grad is None


@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("kind", ["norm", "bias", "linear"])
def test_backward_fusions_of_the_library_read_what_these_filled(
    kind: str, flatten: bool, rows: tuple[int, ...]
) -> None:
    kw = {"dtype": torch.float32, "device": "cpu"}
    ForwardRMSNormLinear.flatten = flatten
    fused: type[ForwardRMSNormLinear | ForwardLinearBiasGELU | ForwardMakeLinear]
    if kind == "norm":
        fused, name = ForwardRMSNormLinear, "BackwardAddRMSNorm"
        linear = te_ops.Linear(16, 8, bias=False, **kw)
        model = te_ops.Sequential(te_ops.MakeExtraOutput(), te_ops.RMSNorm(16, **kw), linear)
    elif kind == "bias":
        fused, name = ForwardLinearBiasGELU, "BackwardActivationBias"
        model = te_ops.Sequential(te_ops.Linear(16, 8, **kw), te_ops.GELU())
    else:
        fused, name = ForwardMakeLinear, "BackwardLinearAdd"
        model = te_ops.Sequential(te_ops.MakeExtraOutput(), te_ops.Linear(16, 8, bias=False, **kw))

    def reference(x: torch.Tensor, p: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if kind == "norm":
            return F.linear(F.rms_norm(x, (16,), p["1.weight"], 1e-5), p["2.weight"]), x * 1
        if kind == "bias":
            return (F.gelu(F.linear(x, p["0.weight"], p["0.bias"]), approximate="tanh"),)
        return F.linear(x, p["1.weight"]), x * 1

    fill(model)
    x = rand(*rows, 16, dtype=torch.float32, grad=True)
    backward = [info.name for info in te_ops.fusions() if info.stage == "backward"]
    with te_ops.register_forward_fusion(fused.fuse_ops), te_ops.enable(*backward):
        outputs = model(x)
        fuser = model._module_groups[0]
        assert fused in [type(op) for op, _ in fuser._forward_ops]
        assert name in [type(op).__name__ for op, _ in fuser._backward_ops]
        compare(model, outputs, reference, x)

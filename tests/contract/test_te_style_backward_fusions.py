"""Backward-only and joint fusions written for te.ops: forward stays unfused, or is theirs too.

They read the contexts that the operations' own forwards filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import opfuser as te_ops
from tests.contract.te_style_backward import (
    BackwardAddRMSNorm,
    BackwardBiasActivation,
    BackwardLayerNorm,
    BackwardLinearScale,
    BackwardReadsFlags,
    JointGLU,
    Windowed,
)
from tests.hazards.tensors import close, fill, leaf, rand

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True)
def _only_these_fusions() -> Iterator[None]:
    ours = [info.name for info in te_ops.fusions()]
    for cls in Windowed.__subclasses__():
        cls.calls = 0
    with te_ops.disable(*ours):
        yield


def check(model: te_ops.Sequential, reference: Any, x: torch.Tensor, unused: int = 0) -> None:
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    x64, tensors = leaf(x), {name: leaf(p) for name, p in model.named_parameters()}
    wants = reference(x64, tensors)
    wants = wants if isinstance(wants, tuple) else (wants,)
    count = len(outputs) - unused
    grads = [rand(*out.shape, dtype=out.dtype) for out in outputs[:count]]
    torch.autograd.backward(outputs[:count], grads)
    torch.autograd.backward(wants[:count], [g.double() for g in grads])
    pairs = [*zip(outputs, wants), (x.grad, x64.grad)]
    pairs += [(p.grad, tensors[name].grad) for name, p in model.named_parameters()]
    for got, want in pairs:
        scale = max(1.0, want.abs().max().item())
        close(got.double() / scale, want / scale, TOLERANCE[x.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prepend", [False, True])
def test_linear_scale(dtype: torch.dtype, prepend: bool) -> None:
    model = fill(
        te_ops.Sequential(te_ops.Linear(16, 8, bias=False, dtype=dtype), te_ops.ConstantScale(0.3))
    )
    with te_ops.register_backward_fusion(BackwardLinearScale.fuse_ops, prepend=prepend):
        check(
            model,
            lambda x, p: 0.3 * F.linear(x, p["0.weight"]),
            rand(5, 16, dtype=dtype, grad=True),
        )
        assert BackwardLinearScale.calls == 1
        fuser = model._module_groups[0]
        assert [type(op) for op, _ in fuser._forward_ops] == [
            te_ops.BasicLinear,
            te_ops.ConstantScale,
        ]
        ((op, indices),) = fuser._backward_ops
        assert isinstance(op, BackwardLinearScale)
        assert indices == [0, 1]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("unused", [0, 1])
def test_make_extra_output_rmsnorm(dtype: torch.dtype, rows: tuple[int, ...], unused: int) -> None:
    model = fill(te_ops.Sequential(te_ops.MakeExtraOutput(), te_ops.RMSNorm(16, dtype=dtype)))
    with te_ops.register_backward_fusion(BackwardAddRMSNorm.fuse_ops):
        check(
            model,
            lambda x, p: (F.rms_norm(x, (16,), p["1.weight"], 1e-5), x * 1),
            rand(*rows, 16, dtype=dtype, grad=True),
            unused,
        )
    assert BackwardAddRMSNorm.calls == 1


def test_a_step_may_span_the_first_operation_that_needs_a_gradient() -> None:
    """The input needs nothing, so that only the second operation of the step runs backward."""
    norm = fill(te_ops.RMSNorm(16))
    model = te_ops.Sequential(te_ops.SiLU(), te_ops.MakeExtraOutput(), norm)
    x, dy = rand(5, 16, dtype=torch.float32), rand(5, 16, dtype=torch.float32)
    with te_ops.register_backward_fusion(BackwardAddRMSNorm.fuse_ops):
        y, extra = model(x)
        assert [op.requires_grad for op in (y, extra)] == [True, False]
        y.backward(dy)
    assert BackwardAddRMSNorm.calls == 1
    w = leaf(norm.weight)
    F.rms_norm(F.silu(x.double()), (16,), w, 1e-5).backward(dy.double())
    close(norm.weight.grad, w.grad, 1e-5)
    assert x.grad is None


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=str)
def test_layernorm(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    model = fill(te_ops.Sequential(te_ops.LayerNorm(16, dtype=dtype), te_ops.SiLU()))
    with te_ops.register_backward_fusion(BackwardLayerNorm.fuse_ops):
        check(
            model,
            lambda x, p: F.silu(F.layer_norm(x, (16,), p["0.weight"], p["0.bias"], 1e-5)),
            rand(*rows, 16, dtype=dtype, grad=True),
        )
    assert BackwardLayerNorm.calls == 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=str)
def test_bias_activation(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    model = fill(te_ops.Sequential(te_ops.Linear(16, 8, dtype=dtype), te_ops.SiLU()))
    with te_ops.register_backward_fusion(BackwardBiasActivation.fuse_ops):
        check(
            model,
            lambda x, p: F.silu(F.linear(x, p["0.weight"], p["0.bias"])),
            rand(*rows, 16, dtype=dtype, grad=True),
        )
    assert BackwardBiasActivation.calls == 1


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_attributes_that_te_ops_forwards_leave_on_the_context(needs: tuple[bool, bool]) -> None:
    BackwardReadsFlags.calls = 0
    model = fill(te_ops.Sequential(te_ops.Linear(16, 8, bias=False), te_ops.ConstantScale(0.3)))
    x = rand(5, 16, dtype=torch.float32, grad=needs[0])
    model[0].weight.requires_grad_(needs[1])
    dy = rand(5, 8, dtype=torch.float32)
    with te_ops.register_backward_fusion(BackwardReadsFlags.fuse_ops):
        model(x).backward(dy)
    assert BackwardReadsFlags.calls == 1
    x64, w = leaf(x), leaf(model[0].weight)
    (0.3 * F.linear(x64, w)).backward(dy.double())
    for got, want, needed in zip((x, model[0].weight), (x64, w), needs):
        if needed:
            close(got.grad, want.grad, 1e-4)
        else:
            assert got.grad is None


def test_joint_fusion_comes_before_the_others() -> None:
    model = fill(
        te_ops.Sequential(
            te_ops.Linear(8, 8, bias=False), te_ops.ConstantScale(-0.3), te_ops.ReLU()
        )
    )
    with (
        te_ops.register_backward_fusion(BackwardLinearScale.fuse_ops, prepend=True),
        te_ops.register_forward_backward_fusion(JointGLU.fuse_ops),
    ):
        x = rand(5, 8, dtype=torch.float32, grad=True)
        check(model, lambda x, p: F.relu(-0.3 * F.linear(x, p["0.weight"])), x)
    assert (JointGLU.calls, BackwardLinearScale.calls) == (1, 0)
    fuser = model._module_groups[0]
    assert [indices for _, indices in fuser._forward_ops] == [[0], [1, 2]]
    assert fuser._forward_ops[1][0] is fuser._backward_ops[1][0]

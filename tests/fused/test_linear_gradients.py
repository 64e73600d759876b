"""What the GEMMs and sums of a backward pass take in: residual gradients, factors, activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    L2Normalization,
    Linear,
    MakeExtraOutput,
    OperationContext,
    Residual,
    Sequential,
    SwiGLU,
    gemm,
)
from opfuser.basic.activation import GELU, ReLU, SiLU, Softplus
from opfuser.errors import InputError
from opfuser.fused import BackwardActivationBias, BackwardLinearScale
from opfuser.op import GradNeeds
from opfuser.testing import assert_fused, assert_not_fused
from tests.contract.tensors import against
from tests.fused.examples import (
    BF16,
    DTYPES,
    F32,
    F64,
    FP16,
    Case,
    check,
    leaf,
    only,
    refused,
    without_bias,
)
from tests.kernels.blocks import small_blocks

ADD, SCALE, ACTIVATION = "backward_linear_add", "backward_linear_scale", "backward_activation_bias"


def several_taps() -> list[nn.Module]:
    """The last linear could also fuse with its factor; the residual comes first."""
    taps = [MakeExtraOutput(), MakeExtraOutput()]
    tapped = [BasicLinear(6, 5), MakeExtraOutput(), Linear(5, 4)]
    return [*tapped, *taps, BasicLinear(4, 3), ConstantScale(0.5)]


def scaled(scale: float) -> list[nn.Module]:
    return [BasicLinear(6, 4), ConstantScale(scale)]


def several_factors() -> list[nn.Module]:
    first = [ConstantScale(2.0), BasicLinear(6, 5), ConstantScale(0.3), ConstantScale(0.7)]
    return [*first, BasicLinear(5, 4), ConstantScale(-3)]


def several_activations() -> list[nn.Module]:
    """The first bias goes into the GEMM in forward."""
    linear = [BasicLinear(6, 4), Bias(4), SiLU()]
    return [*linear, Bias(4), Bias(4), ReLU(), L2Normalization()]


def then_sum() -> list[nn.Module]:
    """Under autocast the gradient of a sum with fp32 is fp32, that of the activation is not."""
    return [Bias(6), GELU(), AddExtraInput()]


CASES = {
    (ADD, "in place"): Case(
        lambda: [MakeExtraOutput(in_place=True), BasicLinear(6, 4)], dtypes=(F32, BF16)
    ),
    (ADD, "several"): Case(several_taps, (33, 6), dtypes=(F64, BF16), times=2),
    (SCALE, "zero"): Case(lambda: scaled(0.0)),
    (SCALE, "negative"): Case(lambda: scaled(-2.5), dtypes=(BF16,)),
    (SCALE, "small"): Case(lambda: scaled(1e-3), dtypes=(FP16,)),
    (SCALE, "several"): Case(several_factors, (33, 6), dtypes=(F64, BF16), times=2),
    (ACTIVATION, "several"): Case(several_activations, (33, 6), dtypes=(F64, BF16), times=2),
    (ACTIVATION, "a threshold"): Case(lambda: [Bias(6), Softplus(2.0, 1.0)], dtypes=(F32, BF16)),
    (ACTIVATION, "cleared bias"): Case(lambda: [without_bias(Bias(6)), SiLU()]),
    (ACTIVATION, "sum under autocast"): Case(then_sum, extras=(6,), autocast=True),
}


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_values(case: tuple[str, str]) -> None:
    check(case[0], CASES[case])


def test_where_they_are_refused() -> None:
    tapped = Sequential(MakeExtraOutput(), BasicLinear(6, 4))
    assert refused(tapped, ADD, torch.randn(3, 6)) == [
        (0, "NO_GRAD: no gradient is needed at or before its first operation")
    ]
    assert_not_fused(Sequential(Bias(6), SwiGLU()), ACTIVATION, leaf(3, 6))
    frozen = Sequential(Bias(6).requires_grad_(False), SiLU(), BasicLinear(6, 4))
    assert_not_fused(frozen, ACTIVATION, torch.randn(3, 6), code="NO_GRAD")


@pytest.fixture
def additions(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What GEMMs of input gradients are asked to add, and whether in place."""
    seen: list[dict[str, Any]] = []
    dgrad = gemm.dgrad

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "add" in kwargs:
            seen.append(kwargs)
        return dgrad(*args, **kwargs)

    monkeypatch.setattr("opfuser.gemm.dgrad", spy)
    return seen


@pytest.mark.parametrize("keep", [False, True])
def test_the_gemm_adds_in_place_to_what_the_engine_made(
    keep: bool, additions: list[dict[str, Any]]
) -> None:
    """And not to the gradient of a public output, which is the caller's."""
    inner = Residual(BasicLinear(6, 6), SiLU())
    seq = Sequential(MakeExtraOutput(), BasicLinear(6, 6), inner, SiLU()).double()
    x = leaf(3, 6, dtype=F64)
    g, dy = torch.randn_like(x), torch.randn_like(x)
    given = g.clone(), dy.clone()
    y, public = seq(x)
    torch.autograd.backward([y, public], [dy, g], retain_graph=keep)
    assert [kwargs["in_place"] for kwargs in additions] == [True, False]
    assert torch.equal(g, given[0])
    assert torch.equal(dy, given[1])
    with only():
        want = torch.autograd.grad(seq(x), x, [dy, g])
    torch.testing.assert_close(x.grad, *want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sibling_projections(dtype: torch.dtype, additions: list[dict[str, Any]]) -> None:
    """The GEMM of one adds to the gradient that the other one sends to their common input."""
    gate = Sequential(MakeExtraOutput(), BasicLinear(6, 5, dtype=dtype))
    up = Sequential(BasicLinear(6, 5, dtype=dtype))

    def model(x: torch.Tensor) -> torch.Tensor:
        y, tapped = gate(x)
        return y * up(tapped)

    x = leaf(4, 6, dtype=dtype)
    against(
        model,
        lambda p, x: (x @ p["gate"].t()) * (x @ p["up"].t()),
        x,
        parameters=[("gate", gate[-1].weight), ("up", up[-1].weight)],
    )
    assert [kwargs["add"] is not None for kwargs in additions] == [True]


@pytest.mark.parametrize("residual", [False, True])
def test_scale_of_the_backward_is_that_of_its_forward(residual: bool) -> None:
    """Whichever forward it is, and at every call the one that is set then."""
    seq, x = Sequential(*scaled(0.5), *[AddExtraInput()] * residual), leaf(3, 6)
    linear, scale, *_ = seq
    extras = (torch.zeros(3, 4),) * residual
    assert_fused(
        seq, x, *extras, forward={"forward_linear_scale_add": residual}, backward={SCALE: 1}
    )
    for factor in (0.5, 2.0):
        scale.scale = factor
        y = seq(x, *extras)
        scale.scale = 100.0
        dx, dw = torch.autograd.grad(y.sum(), [x, linear.weight])
        torch.testing.assert_close(y, factor * (x @ linear.weight.t()))
        torch.testing.assert_close(dw, factor * x.detach().sum(0).expand(4, 6))
        torch.testing.assert_close(dx, factor * linear.weight.detach().sum(0).expand(3, 6))


def test_after_a_forward_that_left_no_scale() -> None:
    linear, scale = BasicLinear(6, 4), ConstantScale(0.5)
    ctxs = [OperationContext(), OperationContext()]
    x, w, dy = torch.randn(3, 6), linear.weight.detach(), torch.randn(3, 4)
    ctxs[0].needs, ctxs[0].saved_tensors = GradNeeds(True, (True,), ()), (x, w)
    dx, grads, _ = BackwardLinearScale(scale=scale, linear=linear).fuser_backward(
        ctxs, dy, basic_op_grad_extra_outputs=[(), ()]
    )
    torch.testing.assert_close(dx, 0.5 * dy @ w)
    torch.testing.assert_close(grads[0], (0.5 * dy.t() @ x,))


def test_an_error_names_the_operations_that_are_fused() -> None:
    seq, texts = Sequential(*scaled(0.3), AddExtraInput()), []
    for name in ("forward_linear_scale_add", SCALE):
        with only(name), pytest.raises(InputError, match="must have the same shape") as error:
            seq(torch.randn(3, 6), torch.randn(3, 5))
        texts.append(str(error.value).split(" It was raised in "))
    assert texts[0][0] == texts[1][0]
    assert texts[0][1] == "op 0-2 (ForwardLinearScaleAdd) of the sequence."
    assert texts[1][1] == "op 2 (AddExtraInput) of the sequence."


@pytest.mark.parametrize("block_by_block", [False, True])
def test_rows_saved_flat(block_by_block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As forward fusions written for te.ops save them."""
    if block_by_block:
        small_blocks(monkeypatch, 8)
    x, dy = torch.randn(6, 4), torch.randn(2, 3, 4)
    ctxs = [OperationContext(), OperationContext()]
    ctxs[0].needs = GradNeeds(True, (True,), ())
    ctxs[1].saved_tensors = (x,)
    fused = BackwardActivationBias(bias=Bias(4), activation=ReLU())
    with torch.no_grad():
        dx, [(db,), ()], _ = fused.fuser_backward(ctxs, dy, basic_op_grad_extra_outputs=[(), ()])
    want = dy * (x > 0).view(2, 3, 4)
    assert torch.equal(dx, want)
    torch.testing.assert_close(db, want.sum((0, 1)))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_no_work_for_gradients_that_nobody_needs(needs: tuple[bool, bool]) -> None:
    fused = BackwardActivationBias(bias=Bias(6), activation=SiLU())
    ctxs = [OperationContext(), OperationContext()]
    ctxs[0].needs = GradNeeds(needs[0], (needs[1],), ())
    ctxs[1].saved_tensors = (torch.randn(3, 6),)
    with torch.no_grad():
        dx, [(db,), ()], [(), ()] = fused.fuser_backward(
            ctxs, torch.randn(3, 6), basic_op_grad_extra_outputs=[(), ()]
        )
    assert (dx is not None, db is not None) == needs

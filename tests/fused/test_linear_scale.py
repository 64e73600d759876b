"""Linear and factor: in backward, and in forward with the residual behind them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opfuser import AddExtraInput, BasicLinear, ConstantScale, OperationContext, Sequential
from opfuser.errors import InputError
from opfuser.fused import BackwardLinearScale
from opfuser.op import GradNeeds
from opfuser.testing import assert_fused
from tests.fused.examples import BF16, F32, F64, FP16, Case, check, leaf, only

BACKWARD, FORWARD = "backward_linear_scale", "forward_linear_scale_add"


def scaled(scale: float = 0.3) -> list[nn.Module]:
    return [BasicLinear(6, 4), ConstantScale(scale)]


def lora(scale: float = 0.3) -> list[nn.Module]:
    return [*scaled(scale), AddExtraInput()]


def several() -> list[nn.Module]:
    first = [ConstantScale(2.0), BasicLinear(6, 5), ConstantScale(0.3), ConstantScale(0.7)]
    return [*first, BasicLinear(5, 4), ConstantScale(-3)]


def several_sums() -> list[nn.Module]:
    first = [BasicLinear(6, 4), BasicLinear(4, 5), ConstantScale(-2), AddExtraInput()]
    return [*first, BasicLinear(5, 3), ConstantScale(0.3), AddExtraInput(), ConstantScale(1.5)]


CASES = {
    "zero": Case(lambda: scaled(0.0)),
    "negative": Case(lambda: scaled(-2.5), dtypes=(BF16,)),
    "small": Case(lambda: scaled(1e-3), dtypes=(FP16,)),
    "several": Case(several, (33, 6), dtypes=(F64, BF16), times=2),
}
WITH_SUM = {
    "zero": Case(lambda: lora(0.0), extras=(4,)),
    "negative": Case(lambda: lora(-2.5), extras=(4,), dtypes=(BF16,)),
    "several": Case(several_sums, (33, 6), (5, 3), dtypes=(F32, FP16), times=2),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    check(BACKWARD, CASES[case])


@pytest.mark.parametrize("case", WITH_SUM)
def test_values_with_a_sum(case: str) -> None:
    check(FORWARD, WITH_SUM[case])


@pytest.mark.parametrize("residual", [False, True])
def test_scale_of_the_backward_is_that_of_its_forward(residual: bool) -> None:
    """Whichever forward it is, and at every call the one that is set then."""
    seq, x = Sequential(*(lora(0.5) if residual else scaled(0.5))), leaf(3, 6)
    linear, scale, *_ = seq
    extras = (torch.zeros(3, 4),) * residual
    assert_fused(seq, x, *extras, forward={FORWARD: residual}, backward={BACKWARD: 1})
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
    seq, texts = Sequential(*lora()), []
    for name in (FORWARD, BACKWARD):
        with only(name), pytest.raises(InputError, match="must have the same shape") as error:
            seq(torch.randn(3, 6), torch.randn(3, 5))
        texts.append(str(error.value).split(" It was raised in "))
    assert texts[0][0] == texts[1][0]
    assert texts[0][1] == "op 0-2 (ForwardLinearScaleAdd) of the sequence."
    assert texts[1][1] == "op 2 (AddExtraInput) of the sequence."

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from opfuser import BasicLinear, Bias, ConstantScale, Identity, Linear, Sequential
from opfuser.errors import NotSupportedError
from opfuser.fused import ForwardLinearBiasActivation
from tests.fused.examples import (
    BF16,
    F32,
    F64,
    Case,
    check,
    error_text,
    filled,
    only,
    without_bias,
)

NAME = "forward_linear_bias_activation"


def one() -> list[nn.Module]:
    return [Linear(6, 4)]


def several() -> list[nn.Module]:
    """Preceded, followed and repeated."""
    return [*one(), ConstantScale(0.5), BasicLinear(4, 5), Bias(5), Linear(5, 3)]


def with_bias_in_fp32() -> list[nn.Module]:
    return [BasicLinear(6, 4, dtype=BF16), Bias(4)]


CASES = {
    "several": Case(several, (33, 6), dtypes=(F64, BF16), times=3),
    "cleared bias": Case(lambda: [without_bias(Linear(6, 4))], dtypes=(F32, BF16)),
    "no inner features": Case(lambda: [Linear(0, 4)], (3, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    check(NAME, CASES[case])


def test_bias_of_another_dtype_than_the_weight() -> None:
    seq = Sequential(*filled(with_bias_in_fp32()))
    x = torch.randn(3, 6, dtype=BF16)
    y = seq(x)
    assert seq.plan(x).fused("forward") == {NAME: 1}
    assert y.dtype == BF16
    exact = nn.functional.linear(x.double(), seq[0].weight.double(), seq[1].bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-8)


def test_parameters_of_a_functional_call() -> None:
    seq, x = Sequential(*one()), torch.randn(3, 6)
    seq(x)
    other = {name: torch.randn_like(p) for name, p in seq.named_parameters()}
    torch.testing.assert_close(
        functional_call(seq, other, (x,)),
        nn.functional.linear(x, other["0.weight"], other["0.bias"]),
    )


def test_an_activation_is_not_absorbed() -> None:
    with pytest.raises(NotSupportedError, match="activation must be None: no GEMM returns"):
        ForwardLinearBiasActivation(linear=BasicLinear(6, 4), bias=Bias(4), activation=Identity())


def test_a_bias_of_another_size_raises_what_the_bias_raises() -> None:
    seq, x = Sequential(BasicLinear(6, 4), Bias(3)), torch.randn(3, 6)
    fused = error_text(seq, x)
    with only():
        assert error_text(seq, x) == fused

"""What goes into the GEMM of a linear operation: bias, factor and sum in forward.

What goes into those of backward: tests/fused/test_linear_gradients.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

import opfuser
from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    Identity,
    Linear,
    MakeExtraOutput,
    Sequential,
)
from opfuser.errors import NotSupportedError
from opfuser.fused import ForwardLinearBiasActivation
from opfuser.testing import assert_fused
from tests.contract.tensors import against
from tests.fused.examples import (
    BF16,
    DTYPES,
    F32,
    F64,
    FP16,
    Case,
    check,
    error_text,
    filled,
    leaf,
    only,
    without_bias,
)

BIAS, SUM, SCALE = (
    "forward_linear_bias_activation",
    "forward_linear_bias_add",
    "forward_linear_scale_add",
)


def several() -> list[nn.Module]:
    """Preceded, followed and repeated."""
    return [Linear(6, 4), ConstantScale(0.5), BasicLinear(4, 5), Bias(5), Linear(5, 3)]


def several_sums() -> list[nn.Module]:
    last = [BasicLinear(5, 3), AddExtraInput(), AddExtraInput()]
    return [Linear(6, 4), Linear(4, 5), AddExtraInput(), *last]


def several_factors() -> list[nn.Module]:
    first = [BasicLinear(6, 4), BasicLinear(4, 5), ConstantScale(-2), AddExtraInput()]
    return [*first, BasicLinear(5, 3), ConstantScale(0.3), AddExtraInput(), ConstantScale(1.5)]


def lora(scale: float) -> list[nn.Module]:
    return [BasicLinear(6, 4), ConstantScale(scale), AddExtraInput()]


CASES = {
    (BIAS, "several"): Case(several, (33, 6), dtypes=(F64, BF16), times=3),
    (BIAS, "cleared bias"): Case(lambda: [without_bias(Linear(6, 4))], dtypes=(F32, BF16)),
    (BIAS, "no inner features"): Case(lambda: [Linear(0, 4)], (3, 0)),
    (SUM, "no bias"): Case(
        lambda: [BasicLinear(6, 4), AddExtraInput()], (7, 6), (4,), dtypes=DTYPES
    ),
    (SUM, "several"): Case(several_sums, (33, 6), (5, 3, 3), dtypes=(F64, BF16), times=2),
    (SUM, "cleared bias"): Case(lambda: [without_bias(Linear(6, 4)), AddExtraInput()], extras=(4,)),
    (SCALE, "zero"): Case(lambda: lora(0.0), extras=(4,)),
    (SCALE, "negative"): Case(lambda: lora(-2.5), extras=(4,), dtypes=(BF16,)),
    (SCALE, "several"): Case(several_factors, (33, 6), (5, 3), dtypes=(F32, FP16), times=2),
}


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_values(case: tuple[str, str]) -> None:
    check(case[0], CASES[case])


def test_bias_of_another_dtype_than_the_weight() -> None:
    seq = Sequential(*filled([BasicLinear(6, 4, dtype=BF16), Bias(4)]))
    x = torch.randn(3, 6, dtype=BF16)
    y = seq(x)
    assert seq.plan(x).fused("forward") == {BIAS: 1}
    assert y.dtype == BF16
    exact = nn.functional.linear(x.double(), seq[0].weight.double(), seq[1].bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-8)


def test_parameters_of_a_functional_call() -> None:
    seq, x = Sequential(Linear(6, 4)), torch.randn(3, 6)
    seq(x)
    other = {name: torch.randn_like(p) for name, p in seq.named_parameters()}
    y = nn.functional.linear(x, other["0.weight"], other["0.bias"])
    torch.testing.assert_close(functional_call(seq, other, (x,)), y)


def test_an_activation_is_not_absorbed() -> None:
    with pytest.raises(NotSupportedError, match="activation must be None: no GEMM returns"):
        ForwardLinearBiasActivation(linear=BasicLinear(6, 4), bias=Bias(4), activation=Identity())


def test_a_bias_of_another_size_raises_what_the_bias_raises() -> None:
    seq, x = Sequential(BasicLinear(6, 4), Bias(3)), torch.randn(3, 6)
    fused = error_text(seq, x)
    with only():
        assert error_text(seq, x) == fused


@pytest.mark.parametrize("residual", ["another", "input", "channel"])
def test_a_residual_that_somebody_holds_is_not_written_to(residual: str) -> None:
    """The residual may be the input, given twice or by a channel, which the linear has saved."""
    linear, add, tap = Linear(6, 6, dtype=F64), AddExtraInput(), MakeExtraOutput()
    seq, x = Sequential(linear, add), leaf(3, 6, dtype=F64)
    inputs = [x, leaf(3, 6, dtype=F64) if residual == "another" else x]
    if residual == "channel":
        tap.set_extra_output_channel(0, "residual", output_to_caller=False)
        add.set_extra_input_channel(0, "residual")
        seq, inputs = Sequential(tap, linear, add), [x]
    assert_fused(seq, *inputs, forward={SUM: 1})
    distinct = inputs if residual == "another" else [x]
    against(
        lambda *_: seq(*inputs),
        lambda p, x, *z: (z or [x])[0] + nn.functional.linear(x, p["weight"], p["bias"]),
        *distinct,
        parameters=linear.named_parameters(),
    )


def test_a_hook_inside_keeps_the_operations_apart() -> None:
    add = AddExtraInput()
    add.register_forward_hook(lambda *_: None)
    plan = Sequential(BasicLinear(6, 4), add).plan(torch.randn(3, 6), torch.randn(3, 4))
    assert plan.fused("forward") == {}


def test_without_it_the_bias_goes_into_the_gemm() -> None:
    seq, inputs = Sequential(BasicLinear(6, 4), Bias(4), AddExtraInput()), [leaf(3, 6), leaf(3, 4)]
    with opfuser.disable(SUM):
        assert seq.plan(*inputs).fused("forward") == {BIAS: 1}
    assert seq.plan(*inputs).fused("forward") == {SUM: 1}

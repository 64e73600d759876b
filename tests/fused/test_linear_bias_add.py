from __future__ import annotations

import pytest
import torch
from torch import nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, Linear, MakeExtraOutput, Sequential
from opfuser.testing import assert_fused
from tests.contract.tensors import against
from tests.fused.examples import BF16, DTYPES, F64, Case, check, leaf, without_bias

NAME = "forward_linear_bias_add"


def several() -> list[nn.Module]:
    last = [BasicLinear(5, 3), AddExtraInput(), AddExtraInput()]
    return [Linear(6, 4), Linear(4, 5), AddExtraInput(), *last]


CASES = {
    "no bias": Case(lambda: [BasicLinear(6, 4), AddExtraInput()], (7, 6), (4,), dtypes=DTYPES),
    "several": Case(several, (33, 6), (5, 3, 3), dtypes=(F64, BF16), times=2),
    "cleared bias": Case(lambda: [without_bias(Linear(6, 4)), AddExtraInput()], extras=(4,)),
}


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    check(NAME, CASES[case])


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
    assert_fused(seq, *inputs, forward={NAME: 1})
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
    with opfuser.disable(NAME):
        assert seq.plan(*inputs).fused("forward") == {"forward_linear_bias_activation": 1}
    assert seq.plan(*inputs).fused("forward") == {NAME: 1}

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

import opfuser
from opfuser import BasicLinear, Bias, Linear, Sequential
from opfuser.errors import InputError, NotSupportedError
from opfuser.fused import ForwardLinearBiasActivation
from tests.fused.pairings import (
    DTYPES,
    LAYOUTS,
    Case,
    build,
    check_pairings,
    only,
    plan_of,
    stopped_by,
    what,
    with_subclass,
)
from tests.fused.sharded import hand_built, refusals_when_sharded

NAME = "forward_linear_bias_activation"

ONE = Case(lambda: [Linear(6, 4)], 6, forward={NAME: 1})
SEVERAL = Case(
    lambda: [Linear(6, 4), opfuser.ConstantScale(0.5), BasicLinear(4, 5), Bias(5), Linear(5, 3)],
    6,
    forward={NAME: 3},
)
"""Preceded, followed and repeated."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairings(dtype: torch.dtype, layout: str) -> None:
    check_pairings(ONE, dtype, LAYOUTS[layout])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_again_and_inside_longer_sequences(dtype: torch.dtype) -> None:
    check_pairings(SEVERAL, dtype)


@pytest.mark.parametrize("frozen", [["0.weight"], ["0.bias"], ["0.weight", "0.bias"]], ids=str)
@pytest.mark.parametrize("input_grad", [True, False])
def test_gradients_that_nobody_needs(frozen: list[str], input_grad: bool) -> None:
    if input_grad or len(frozen) < 2:
        check_pairings(ONE, torch.float32, frozen=frozen, input_grad=input_grad)
    seq = build(ONE, torch.float32).requires_grad_(False)
    assert not seq(torch.randn(3, 6)).requires_grad


def test_input_without_gradient() -> None:
    check_pairings(SEVERAL, torch.float32, input_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype: torch.dtype) -> None:
    check_pairings(SEVERAL, dtype, autocast=torch.bfloat16)


@pytest.mark.parametrize("input_dtype", DTYPES, ids=str)
def test_input_of_another_dtype_than_the_weight(input_dtype: torch.dtype) -> None:
    check_pairings(ONE, torch.float32, input_dtype=input_dtype)


def test_bias_of_another_dtype_than_the_weight() -> None:
    seq = Sequential(BasicLinear(6, 4, dtype=torch.bfloat16), Bias(4))
    nn.init.normal_(seq[1].bias)
    x = torch.randn(3, 6, dtype=torch.bfloat16)
    y = seq(x)
    assert seq.plan(x).fused("forward") == {NAME: 1}
    assert y.dtype == torch.bfloat16
    exact = nn.functional.linear(x.double(), seq[0].weight.double(), seq[1].bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2**-8)


def test_cleared_bias() -> None:
    seq = Sequential(Linear(6, 4))
    seq[0].bias = None
    x = torch.randn(3, 6, requires_grad=True)
    assert seq.plan(x).fused("forward") == {NAME: 1}
    y = seq(x)
    torch.testing.assert_close(y, x @ seq[0].weight.t())
    y.sum().backward()
    torch.testing.assert_close(x.grad, seq[0].weight.sum(0).expand(3, 6))


def test_no_inner_features() -> None:
    seq = Sequential(Linear(0, 4))
    nn.init.normal_(seq[0].bias)
    torch.testing.assert_close(seq(torch.randn(3, 0)), seq[0].bias.expand(3, 4))


def test_parameters_are_read_at_every_call() -> None:
    seq = build(ONE, torch.float32)
    x = torch.randn(3, 6)
    seq(x)
    other = {name: torch.randn_like(p) for name, p in seq.named_parameters()}
    torch.testing.assert_close(
        functional_call(seq, other, (x,)),
        nn.functional.linear(x, other["0.weight"], other["0.bias"]),
    )
    seq[0].weight = nn.Parameter(torch.randn(4, 6))
    torch.testing.assert_close(seq(x), nn.functional.linear(x, seq[0].weight, seq[0].bias))


@pytest.mark.parametrize(("at", "code"), [(0, None), (1, "SUBCLASS")])
def test_a_subclass_is_not_matched(at: int, code: str | None) -> None:
    plan = plan_of(*with_subclass([BasicLinear(6, 4), Bias(4)], at))
    assert plan.fused("forward") == {}
    assert stopped_by(plan, NAME) == code


def test_sharding_is_refused_only_where_the_output_is_reduced() -> None:
    assert refusals_when_sharded(NAME, lambda linear: [linear, Bias(4)]) == {
        "column": None,
        "column, sequence-parallel": None,
        "row": "tensor-parallel BasicLinear in row mode communicates right after its forward GEMM",
        "row, sequence-parallel": "sequence-parallel BasicLinear in row mode communicates right "
        "after its forward GEMM",
    }


def test_an_activation_is_not_absorbed() -> None:
    with pytest.raises(NotSupportedError, match="activation must be None: no GEMM returns"):
        ForwardLinearBiasActivation(
            linear=BasicLinear(6, 4), bias=Bias(4), activation=opfuser.Identity()
        )


@pytest.mark.parametrize("bias", [Bias(4), None], ids=["bias", "no bias"])
def test_placed_by_hand(bias: Bias | None) -> None:
    linear = BasicLinear(6, 4)
    fused = ForwardLinearBiasActivation(linear=linear, bias=bias, activation=None)
    assert list(fused.basic_ops) == [linear, *([bias] if bias else [])]
    x = torch.randn(3, 6)
    torch.testing.assert_close(fused(x), nn.functional.linear(x, linear.weight, bias and bias.bias))


def test_wrong_sizes_raise_what_the_basic_operations_raise() -> None:
    for bad, x in (
        (Linear(6, 4), torch.randn(3, 5)),
        ([BasicLinear(6, 4), Bias(3)], torch.randn(3, 6)),
    ):
        seq = Sequential(*(bad if isinstance(bad, list) else [bad]))
        with pytest.raises(InputError) as fused:
            seq(x)
        with only(forward=False), pytest.raises(InputError) as separate:
            seq(x)
        assert what(fused) == what(separate)


def test_sharding_is_refused_by_the_constructor_too() -> None:
    raised = hand_built(lambda linear: ForwardLinearBiasActivation(linear=linear, bias=None))
    assert raised["column"] is None
    assert raised["column, sequence-parallel"] is None
    assert raised["row"] == (
        "tensor-parallel BasicLinear in row mode communicates right after its forward GEMM "
        "(ForwardLinearBiasActivation). Leave the operations separate, and they fuse where that "
        "is possible."
    )

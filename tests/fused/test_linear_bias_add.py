from __future__ import annotations

import pytest
import torch
from torch import nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, Linear, MakeExtraOutput, Sequential
from opfuser.errors import InputError
from opfuser.fused import ForwardLinearBiasAdd
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

NAME = "forward_linear_bias_add"

CASES = {
    "bias": Case(lambda: [Linear(6, 4), AddExtraInput()], 6, (4,), {NAME: 1}),
    "no bias": Case(lambda: [BasicLinear(6, 4), AddExtraInput()], 6, (4,), {NAME: 1}),
    "in place": Case(lambda: [Linear(6, 4), AddExtraInput(in_place=True)], 6, (4,), {NAME: 1}),
    "several": Case(
        lambda: [
            Linear(6, 4),
            Linear(4, 5),
            AddExtraInput(),
            BasicLinear(5, 3),
            AddExtraInput(),
            AddExtraInput(),
        ],
        6,
        (5, 3, 3),
        {NAME: 2, "forward_linear_bias_activation": 1},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_pairings(case: str, dtype: torch.dtype, layout: str) -> None:
    check_pairings(CASES[case], dtype, LAYOUTS[layout])


@pytest.mark.parametrize("frozen", [["0.weight"], ["0.bias"], ["0.weight", "0.bias"]], ids=str)
@pytest.mark.parametrize("input_grad", [True, False])
def test_gradients_that_nobody_needs(frozen: list[str], input_grad: bool) -> None:
    check_pairings(CASES["bias"], torch.float32, frozen=frozen, input_grad=input_grad)


@pytest.mark.parametrize("case", CASES)
def test_autocast(case: str) -> None:
    check_pairings(CASES[case], torch.float32, autocast=torch.bfloat16)
    check_pairings(CASES[case], torch.float32, autocast=torch.bfloat16, extra_dtype=torch.bfloat16)


@pytest.mark.parametrize("extra_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual_of_another_dtype(dtype: torch.dtype, extra_dtype: torch.dtype) -> None:
    check_pairings(CASES["bias"], dtype, extra_dtype=extra_dtype)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_same_tensor_as_input_and_residual(in_place: bool) -> None:
    seq = Sequential(Linear(6, 6), AddExtraInput(in_place=in_place)).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    y = seq(x, x)
    w, b = seq[0].weight, seq[0].bias
    want = torch.autograd.grad((x + nn.functional.linear(x, w, b)).square().sum(), [x, w, b])
    got = torch.autograd.grad(y.square().sum(), [x, w, b])
    assert torch.equal(x, before)
    for g, e in zip(got, want):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_residual_that_an_earlier_operation_saved(in_place: bool) -> None:
    seq = Sequential(
        MakeExtraOutput(), BasicLinear(6, 6), Bias(6), AddExtraInput(in_place=in_place)
    ).double()
    seq[0].set_extra_output_channel(0, "residual", output_to_caller=False)
    seq[3].set_extra_input_channel(0, "residual")
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    y = seq(x)
    assert seq.plan(x).fused("forward") == {NAME: 1}
    assert seq.plan(x).fused("backward") == {"backward_linear_add": 1}
    w, b = seq[1].weight, seq[2].bias
    want = torch.autograd.grad((x + nn.functional.linear(x, w, b)).square().sum(), [x, w, b])
    got = torch.autograd.grad(y.square().sum(), [x, w, b])
    assert torch.equal(x, before)
    for g, e in zip(got, want):
        torch.testing.assert_close(g, e)


def test_cleared_bias() -> None:
    seq = Sequential(Linear(6, 4), AddExtraInput())
    seq[0].bias = None
    x, z = torch.randn(3, 6), torch.randn(3, 4)
    assert seq.plan(x, z).fused("forward") == {NAME: 1}
    torch.testing.assert_close(seq(x, z), z + x @ seq[0].weight.t())


@pytest.mark.parametrize(("at", "code"), [(0, None), (1, "LAYOUT"), (2, "SUBCLASS")])
def test_a_subclass_is_not_matched(at: int, code: str | None) -> None:
    ops = with_subclass([BasicLinear(6, 4), Bias(4), AddExtraInput()], at)
    plan = plan_of(*ops, extras=[4])
    assert NAME not in plan.fused("forward")
    assert stopped_by(plan, NAME) == code


def test_sharding_is_refused_only_where_the_output_is_reduced() -> None:
    assert refusals_when_sharded(NAME, lambda linear: [linear, Bias(4), AddExtraInput()], 4) == {
        "column": None,
        "column, sequence-parallel": None,
        "row": "tensor-parallel BasicLinear in row mode communicates right after its forward GEMM",
        "row, sequence-parallel": "sequence-parallel BasicLinear in row mode communicates right "
        "after its forward GEMM",
    }


@pytest.mark.parametrize("bias", [True, False])
def test_placed_by_hand(bias: bool) -> None:
    linear, offset, add = BasicLinear(6, 4), Bias(4) if bias else None, AddExtraInput()
    fused = ForwardLinearBiasAdd(linear=linear, bias=offset, add=add)
    assert list(fused.basic_ops) == [op for op in (linear, offset, add) if op is not None]
    x, z = torch.randn(3, 6), torch.randn(3, 4)
    torch.testing.assert_close(fused(x, z), z + nn.functional.linear(x, linear.weight))


@pytest.mark.parametrize("case", ["bias", "no bias"])
def test_a_residual_of_another_shape_is_an_error(case: str) -> None:
    seq = build(CASES[case], torch.float32)
    for z in (torch.randn(4), torch.randn(1, 4), torch.randn(3, 5)):
        with pytest.raises(InputError, match="must have the same shape") as fused:
            seq(torch.randn(3, 6), z)
        with only(forward=False), pytest.raises(InputError) as separate:
            seq(torch.randn(3, 6), z)
        assert what(fused) == what(separate)


def test_a_hook_inside_keeps_the_operations_apart() -> None:
    add = AddExtraInput()
    add.register_forward_hook(lambda *_: None)
    seq = Sequential(BasicLinear(6, 4), add)
    plan = seq.plan(torch.randn(3, 6), torch.randn(3, 4))
    assert plan.fused("forward") == {}


def test_switched_off() -> None:
    x, z = torch.randn(3, 6), torch.randn(3, 4)
    seq = Sequential(Linear(6, 4), AddExtraInput())
    with opfuser.disable(NAME):
        assert seq.plan(x, z).fused("forward") == {"forward_linear_bias_activation": 1}
    assert seq.plan(x, z).fused("forward") == {NAME: 1}


def test_sharding_is_refused_by_the_constructor_too() -> None:
    raised = hand_built(
        lambda linear: ForwardLinearBiasAdd(linear=linear, bias=None, add=AddExtraInput())
    )
    assert [name for name, text in raised.items() if text] == ["row", "row, sequence-parallel"]
    assert "(ForwardLinearBiasAdd). Leave the operations separate" in raised["row"]

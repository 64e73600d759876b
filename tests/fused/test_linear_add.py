from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from opfuser import BasicLinear, ConstantScale, Linear, MakeExtraOutput, Sequential, gemm
from opfuser.fused import BackwardLinearAdd
from tests.fused.pairings import (
    DTYPES,
    LAYOUTS,
    Case,
    build,
    check_pairings,
    only,
    plan_of,
    stopped_by,
    with_subclass,
)
from tests.fused.sharded import hand_built, refusals_when_sharded

NAME = "backward_linear_add"


def branch(in_place: bool = False) -> Case:
    return Case(
        lambda: [MakeExtraOutput(in_place=in_place), BasicLinear(6, 4)], 6, (), {}, {NAME: 1}
    )


SEVERAL = Case(
    lambda: [
        BasicLinear(6, 5),
        MakeExtraOutput(),
        Linear(5, 4),
        MakeExtraOutput(),
        MakeExtraOutput(),
        BasicLinear(4, 3),
        ConstantScale(0.5),
    ],
    6,
    (),
    {"forward_linear_bias_activation": 1},
    {NAME: 2},
)
"""The last linear could also fuse with its factor; the residual comes first."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_pairings(in_place: bool, dtype: torch.dtype, layout: str) -> None:
    check_pairings(branch(in_place), dtype, LAYOUTS[layout])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_again_and_inside_longer_sequences(dtype: torch.dtype) -> None:
    check_pairings(SEVERAL, dtype)


@pytest.mark.parametrize("unread", [[0], [1], [2], [0, 2], [0, 1, 2]], ids=str)
def test_extra_outputs_without_a_gradient_count_as_zero(unread: list[int]) -> None:
    check_pairings(SEVERAL, torch.float32, no_grad_for=unread)


def test_main_output_without_a_gradient_counts_as_zero() -> None:
    check_pairings(branch(), torch.float32, no_grad_for=[-1])


def test_frozen_weight() -> None:
    check_pairings(branch(), torch.float32, frozen=["1.weight"])


def test_an_input_without_gradient_needs_no_sum() -> None:
    case = branch()._replace(backward={})
    check_pairings(case, torch.float32, input_grad=False)
    plan = plan_of(*case.ops(), grad=False)
    assert [str(why) for _, why in plan.record(NAME).refusals] == [
        "NO_GRAD: no gradient is needed at or before its first operation"
    ]


def test_autocast() -> None:
    check_pairings(branch(), torch.float32, autocast=torch.bfloat16)
    check_pairings(SEVERAL, torch.float32, autocast=torch.bfloat16)


@pytest.mark.parametrize("input_dtype", DTYPES, ids=str)
def test_residual_of_another_dtype_than_the_weight(input_dtype: torch.dtype) -> None:
    check_pairings(branch(), torch.float32, input_dtype=input_dtype)


@pytest.mark.parametrize("overwrite", [False, True])
def test_main_grad(overwrite: bool) -> None:
    seq = Sequential(MakeExtraOutput(), BasicLinear(6, 4, accumulate_into_main_grad=True))
    w = seq[1].weight
    x = torch.randn(3, 6, requires_grad=True)
    dy, g, start = torch.randn(3, 4), torch.randn(3, 6), torch.randn(4, 6)
    w.main_grad = start.clone()
    w.overwrite_main_grad = overwrite
    y, residual = seq(x)
    assert seq.plan(x).fused("backward") == {NAME: 1}
    torch.autograd.backward([y, residual], [dy, g])
    torch.testing.assert_close(w.main_grad, dy.t() @ x + (0 if overwrite else start))
    torch.testing.assert_close(x.grad, dy @ w + g)
    assert w.grad_added_to_main_grad
    assert w.grad.data_ptr() != w.main_grad.data_ptr()


def test_a_second_backward() -> None:
    seq = build(branch(), torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    y, residual = seq(x)
    loss = y.square().sum() + residual.square().sum()
    first = torch.autograd.grad(loss, [x, seq[1].weight], retain_graph=True)
    second = torch.autograd.grad(loss, [x, seq[1].weight])
    for a, b in zip(first, second):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keep", [False, True])
def test_the_gemm_adds_in_place_to_what_the_engine_made(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not to the gradient of a public output, which is the caller's."""
    seen: list[bool] = []

    dgrad = gemm.dgrad

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "add" in kwargs:
            seen.append(kwargs["in_place"])
        return dgrad(*args, **kwargs)

    monkeypatch.setattr("opfuser.gemm.dgrad", spy)
    inner = opfuser.Residual(BasicLinear(6, 6), opfuser.SiLU())
    seq = Sequential(MakeExtraOutput(), BasicLinear(6, 6), inner, opfuser.SiLU()).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    g, dy = torch.randn_like(x), torch.randn_like(x)
    given = g.clone(), dy.clone()
    y, public = seq(x)
    torch.autograd.backward([y, public], [dy, g], retain_graph=keep)
    assert seen == [True, False]
    assert torch.equal(g, given[0])
    assert torch.equal(dy, given[1])
    with only(forward=False, backward=False):
        want = torch.autograd.grad(seq(x), x, [dy, g])
    torch.testing.assert_close(x.grad, *want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sibling_projections(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GEMM of one adds to the gradient that the other one sends to their common input."""
    received: list[bool] = []

    dgrad = gemm.dgrad

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "add" in kwargs:
            received.append(kwargs["add"] is not None)
        return dgrad(*args, **kwargs)

    monkeypatch.setattr("opfuser.gemm.dgrad", spy)
    gate = Sequential(MakeExtraOutput(), BasicLinear(6, 5, dtype=dtype))
    up = Sequential(BasicLinear(6, 5, dtype=dtype))
    x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    dy = torch.randn(4, 5, dtype=dtype)
    y, tapped = gate(x)
    (y * up(tapped)).backward(dy)
    assert received == [True]
    grads = []
    for wide in (dtype, torch.float64):
        leaf = x.detach().to(wide).requires_grad_()
        a, b = (leaf @ seq[-1].weight.detach().to(wide).t() for seq in (gate, up))
        (a * b).backward(dy.to(wide))
        grads.append(leaf.grad.double())
    plain, exact = grads
    floor = torch.finfo(dtype).eps * exact.abs().max()
    error = (x.grad.double() - exact).abs().max()
    assert error <= 2 * (plain - exact).abs().max() + floor


@pytest.mark.parametrize(("at", "code"), [(0, None), (1, "SUBCLASS")])
def test_a_subclass_is_not_matched(at: int, code: str | None) -> None:
    plan = plan_of(*with_subclass([MakeExtraOutput(), BasicLinear(6, 4)], at))
    assert plan.fused("backward") == {}
    assert stopped_by(plan, NAME) == code


def test_sharding_is_refused_where_the_backward_communicates() -> None:
    assert refusals_when_sharded(NAME, lambda linear: [MakeExtraOutput(), linear]) == {
        "column": "tensor-parallel BasicLinear in column mode communicates right after its "
        "input-gradient GEMM",
        "column, sequence-parallel": "sequence-parallel BasicLinear in column mode communicates "
        "right after its input-gradient GEMM",
        "row": None,
        "row, sequence-parallel": "sequence-parallel BasicLinear in row mode communicates before "
        "its gradient GEMMs",
    }


@pytest.mark.parametrize("input_grad", [True, False])
def test_placed_by_hand(input_grad: bool) -> None:
    tap, linear = MakeExtraOutput(), BasicLinear(6, 4)
    fused = BackwardLinearAdd(backward_add=tap, linear=linear)
    assert list(fused.basic_ops) == [tap, linear]
    x = torch.randn(3, 6, requires_grad=input_grad)
    y, residual = Sequential(fused)(x)
    (y.sum() + 2 * residual.sum()).backward()
    torch.testing.assert_close(linear.weight.grad, x.detach().sum(0).expand(4, 6))
    if input_grad:
        torch.testing.assert_close(x.grad, 2 + linear.weight.detach().sum(0).expand(3, 6))


def test_a_residual_inside_the_sequence() -> None:
    seq = Sequential(opfuser.Residual(Linear(6, 6)), opfuser.Residual(BasicLinear(6, 6))).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert seq.plan(x).fused("backward") == {NAME: 2}
    got = torch.autograd.grad(seq(x).square().sum(), [x, *seq.parameters()])
    with only(forward=False, backward=False):
        want = torch.autograd.grad(seq(x).square().sum(), [x, *seq.parameters()])
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_switched_off() -> None:
    with opfuser.disable(NAME):
        assert plan_of(*branch().ops()).fused("backward") == {}


def test_gradients_stay_apart_when_accumulated() -> None:
    seq = build(branch(), torch.float32)
    x = torch.randn(3, 6, requires_grad=True)
    g = torch.randn(3, 6)
    before = g.clone()
    for _ in range(2):
        y, residual = seq(x)
        torch.autograd.backward([y, residual], [torch.ones_like(y), g])
    nn.init.zeros_(x.grad)
    assert torch.equal(g, before)


def test_sharding_is_refused_by_the_constructor_too() -> None:
    raised = hand_built(
        lambda linear: BackwardLinearAdd(backward_add=MakeExtraOutput(), linear=linear)
    )
    assert [name for name, text in raised.items() if text is None] == ["row"]
    assert "(BackwardLinearAdd). Leave the operations separate" in raised["column"]

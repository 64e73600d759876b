"""Sum and norm in forward, residual gradient and norm in backward: RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, MakeExtraOutput, Sequential
from opfuser.basic.layer_norm import LayerNorm
from opfuser.basic.rms_norm import RMSNorm
from opfuser.errors import InputError
from opfuser.fused import (
    BackwardAddLayerNorm,
    BackwardAddRMSNorm,
    ForwardAddLayerNorm,
    ForwardAddRMSNorm,
)
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

NORMS: dict[str, Any] = {"rms": RMSNorm, "layer": LayerNorm}
each_norm = pytest.mark.parametrize("kind", NORMS)


@pytest.fixture(autouse=True)
def no_joint_fusions() -> Iterator[None]:
    """Those of a norm and a linear would take some of the norms."""
    with only():
        yield


def forward(kind: str) -> str:
    return f"forward_add_{kind}_norm"


def backward(kind: str) -> str:
    return f"backward_add_{kind}_norm"


def pre_norm(kind: str, **kwargs: Any) -> Case:
    """The sum goes on as residual stream."""
    return Case(
        lambda: [AddExtraInput(), MakeExtraOutput(), NORMS[kind](6, **kwargs)],
        6,
        (6,),
        {forward(kind): 1},
        {backward(kind): 1},
    )


def post_norm(kind: str) -> Case:
    return Case(lambda: [AddExtraInput(), NORMS[kind](6)], 6, (6,), {forward(kind): 1})


def start(kind: str, in_place: bool = False) -> Case:
    return Case(
        lambda: [MakeExtraOutput(in_place=in_place), NORMS[kind](6)], 6, (), {}, {backward(kind): 1}
    )


def several(kind: str) -> Case:
    """Three sums; the second comes after a linear, which takes it on a CPU."""
    norm = NORMS[kind]
    return Case(
        lambda: [
            opfuser.ConstantScale(2.0),
            AddExtraInput(),
            MakeExtraOutput(),
            norm(6),
            BasicLinear(6, 4),
            AddExtraInput(),
            MakeExtraOutput(),
            norm(4),
            AddExtraInput(),
            norm(4),
        ],
        6,
        (6, 4, 4),
        {"forward_linear_bias_add": 1, forward(kind): 2},
        {backward(kind): 2},
    )


@each_norm
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [pre_norm, post_norm, start])
def test_pairings(case: Any, dtype: torch.dtype, layout: str, kind: str) -> None:
    check_pairings(case(kind), dtype, LAYOUTS[layout])


@each_norm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_again_and_inside_longer_sequences(dtype: torch.dtype, kind: str) -> None:
    check_pairings(several(kind), dtype)


@each_norm
@pytest.mark.parametrize("kwargs", [{"zero_centered_gamma": True}, {"eps": 0.1}], ids=str)
def test_options_of_the_norm(kwargs: dict[str, Any], kind: str) -> None:
    check_pairings(pre_norm(kind, **kwargs), torch.float32)


@each_norm
def test_a_norm_over_several_dimensions(kind: str) -> None:
    case = Case(
        lambda: [AddExtraInput(), MakeExtraOutput(), NORMS[kind]((3, 6))],
        6,
        (6,),
        {forward(kind): 1},
        {backward(kind): 1},
    )
    check_pairings(case, torch.float32, LAYOUTS["batched"])


@each_norm
@pytest.mark.parametrize("unread", [[0], [1], [0, 1], [-1]], ids=str)
def test_outputs_without_a_gradient_count_as_zero(unread: list[int], kind: str) -> None:
    check_pairings(several(kind), torch.float32, no_grad_for=unread)


@each_norm
@pytest.mark.parametrize("in_place", [False, True])
def test_in_place_is_only_a_permission(in_place: bool, kind: str) -> None:
    check_pairings(start(kind, in_place), torch.float32)


@each_norm
@pytest.mark.parametrize("input_grad", [True, False])
def test_frozen_weights(input_grad: bool, kind: str) -> None:
    frozen = ["2.weight", "2.bias"][: 1 if kind == "rms" else 2]
    check_pairings(pre_norm(kind), torch.float32, frozen=frozen, input_grad=input_grad)
    check_pairings(pre_norm(kind), torch.float32, frozen=frozen[:1], input_grad=input_grad)


@each_norm
def test_an_input_without_gradient_needs_no_sum(kind: str) -> None:
    check_pairings(start(kind)._replace(backward={}), torch.float32, input_grad=False)
    plan = plan_of(*start(kind).ops(), grad=False)
    assert [why.code for _, why in plan.record(backward(kind)).refusals] == ["NO_GRAD"]


@each_norm
@pytest.mark.parametrize("extra_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(extra_dtype: torch.dtype, kind: str) -> None:
    check_pairings(several(kind), torch.float32, autocast=torch.bfloat16, extra_dtype=extra_dtype)


@each_norm
def test_autocast_does_not_round_the_residual_gradient(kind: str) -> None:
    seq = build(start(kind), torch.float32)
    x = torch.randn(3, 6, requires_grad=True)
    g = torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, residual = seq(x)
    assert y.dtype == torch.bfloat16
    (dx,) = torch.autograd.grad([y, residual], x, [torch.zeros_like(y), g])
    assert torch.equal(dx, g)


@each_norm
@pytest.mark.parametrize("extra_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual_of_another_dtype(dtype: torch.dtype, extra_dtype: torch.dtype, kind: str) -> None:
    check_pairings(pre_norm(kind), dtype, extra_dtype=extra_dtype)


@each_norm
def test_a_residual_inside_the_sequence(kind: str) -> None:
    norm = NORMS[kind]
    seq = Sequential(
        opfuser.Residual(norm(6), BasicLinear(6, 6), opfuser.ConstantScale(0.5)),
        opfuser.Residual(norm(6), opfuser.Identity()),
        norm(6),
    ).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    plan = seq.plan(x)
    assert plan.fused("forward") == {"forward_linear_scale_add": 1, forward(kind): 1}
    assert plan.fused("backward") == {backward(kind): 2, "backward_linear_scale": 1}
    got = torch.autograd.grad(seq(x).square().sum(), [x, *seq.parameters()])
    with only(forward=False, backward=False):
        want = torch.autograd.grad(seq(x).square().sum(), [x, *seq.parameters()])
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@each_norm
@pytest.mark.parametrize(
    ("at", "code"), [(0, None), (1, "LAYOUT"), (2, "SUBCLASS")], ids=["add", "tap", "norm"]
)
def test_a_subclass_is_not_matched(at: int, code: str | None, kind: str) -> None:
    plan = plan_of(*with_subclass(pre_norm(kind).ops(), at), extras=[6])
    assert plan.fused("forward") == {}
    assert stopped_by(plan, forward(kind)) == code
    assert plan.fused("backward") == ({backward(kind): 1} if at == 0 else {})


@each_norm
def test_a_residual_of_another_shape_is_an_error(kind: str) -> None:
    seq = build(pre_norm(kind), torch.float32)
    for x, z in (((3, 6), (6,)), ((3, 6), (1, 6)), ((3, 5), (3, 5))):
        with pytest.raises(InputError) as fused:
            seq(torch.randn(x), torch.randn(z))
        with only(forward=False), pytest.raises(InputError) as separate:
            seq(torch.randn(x), torch.randn(z))
        assert what(fused) == what(separate)


@pytest.mark.parametrize("tap", [True, False])
def test_placed_by_hand_in_forward(tap: bool) -> None:
    for norm, make in (
        (RMSNorm(6), lambda a, m, n: ForwardAddRMSNorm(add=a, make_extra=m, rmsnorm=n)),
        (LayerNorm(6), lambda a, m, n: ForwardAddLayerNorm(add=a, make_extra=m, layernorm=n)),
    ):
        add, make_extra = AddExtraInput(), MakeExtraOutput() if tap else None
        fused = make(add, make_extra, norm)
        assert list(fused.basic_ops) == [op for op in (add, make_extra, norm) if op is not None]
        x, z = torch.randn(3, 6), torch.randn(3, 6)
        out = fused(x, z)
        y = out[0] if tap else out
        torch.testing.assert_close(y, norm.reference(x + z))
        if tap:
            torch.testing.assert_close(out[1], x + z)


@pytest.mark.parametrize("input_grad", [True, False])
def test_placed_by_hand_in_backward(input_grad: bool) -> None:
    for norm, make in (
        (RMSNorm(6), lambda a, n: BackwardAddRMSNorm(add=a, rmsnorm=n)),
        (LayerNorm(6), lambda a, n: BackwardAddLayerNorm(add=a, layernorm=n)),
    ):
        tap = MakeExtraOutput()
        fused = make(tap, norm)
        assert list(fused.basic_ops) == [tap, norm]
        x = torch.randn(3, 6, requires_grad=input_grad)
        dy, g = torch.randn(3, 6), torch.randn(3, 6)
        wrt = [norm.weight, *([x] if input_grad else [])]
        y, residual = Sequential(fused)(x)
        given = [(y, dy), (residual, g)][: 2 if input_grad else 1]
        got = torch.autograd.grad([o for o, _ in given], wrt, [d for _, d in given])
        want = torch.autograd.grad(norm.reference(x), wrt, dy)
        torch.testing.assert_close(got[0], want[0])
        if input_grad:
            torch.testing.assert_close(got[1], want[1] + g)


@each_norm
def test_gradients_stay_apart_when_accumulated(kind: str) -> None:
    seq = build(start(kind), torch.float32)
    x = torch.randn(3, 6, requires_grad=True)
    g = torch.randn(3, 6)
    before = g.clone()
    for _ in range(2):
        y, residual = seq(x)
        torch.autograd.backward([y, residual], [torch.ones_like(y), g])
    nn.init.zeros_(x.grad)
    assert torch.equal(g, before)


@each_norm
def test_switched_off(kind: str) -> None:
    with opfuser.disable(forward(kind), backward(kind)):
        plan = plan_of(*pre_norm(kind).ops(), extras=[6])
    assert plan.fused("forward") == plan.fused("backward") == {}

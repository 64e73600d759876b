"""Norm and rotary embedding of queries and keys, in forward and in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser import BasicLinear, Identity, QKNorm, RotaryEmbedding, Sequential
from opfuser.errors import InputError, NotSupportedError
from opfuser.fused.backward_qk_norm_rotary import BackwardQKNormRotary
from opfuser.fused.forward_qk_norm_rotary import ForwardQKNormRotary
from opfuser.testing import check_fusion
from tests.fused.pairings import (
    DTYPES,
    LAYOUTS,
    PAIRINGS,
    Case,
    Layout,
    build,
    check_pairings,
    only,
    stopped_by,
    what,
    with_subclass,
)

FORWARD, BACKWARD = "forward_qk_norm_rotary", "backward_qk_norm_rotary"
NAMES = [FORWARD, BACKWARD]
BATCHED = {
    "batched": LAYOUTS["batched"],
    "one token": Layout((1, 1)),
    "no batch": Layout((0, 3)),
    "no tokens": LAYOUTS["zero rows in a batch"],
    "many tokens": Layout((3, 41)),
    "strided": LAYOUTS["strided"],
    "transposed": LAYOUTS["transposed"],
    "expanded": Layout((4, 3), "expanded", "expanded"),
    "constant gradient": Layout((4, 3), grads="constant"),
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "halves": ({}, {}),
    "neighbours": ({"eps": 0.1}, {"interleaved": True}),
    "partial": ({"zero_centered_gamma": True}, {"rotary_dim": 4, "base": 500.0}),
}


def pair(variant: str = "halves", kv_heads: int = 2) -> list[Any]:
    norm, rotary = VARIANTS[variant]
    return [
        QKNorm(4, 6, num_kv_heads=kv_heads, **norm),
        RotaryEmbedding(4, 6, num_kv_heads=kv_heads, **rotary),
    ]


def case(variant: str = "halves") -> Case:
    return Case(lambda: pair(variant), 48, (), {FORWARD: 1}, {BACKWARD: 1})


@pytest.mark.parametrize("layout", BATCHED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairings(dtype: torch.dtype, layout: str) -> None:
    check_pairings(case(), dtype, BATCHED[layout])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(dtype: torch.dtype, variant: str) -> None:
    check_pairings(case(variant), dtype, LAYOUTS["batched"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_checked_like_a_users_fusion(variant: str, name: str, device: torch.device) -> None:
    ops = [op.to(device) for op in pair(variant)]
    x = torch.randn(2, 5, 48, device=device)
    check_fusion(name, ops, x, dtypes=DTYPES, zero_rows=True)


def test_matches_again_and_inside_longer_sequences() -> None:
    several = Case(
        lambda: [BasicLinear(8, 48), *pair(), BasicLinear(48, 48), *pair("neighbours"), Identity()],
        8,
        (),
        {FORWARD: 2},
        {BACKWARD: 2},
    )
    for dtype in DTYPES:
        check_pairings(several, dtype, LAYOUTS["batched"])


@pytest.mark.parametrize("frozen", [["0.q_weight"], ["0.k_weight"], ["0.q_weight", "0.k_weight"]])
def test_frozen_weights(frozen: list[str]) -> None:
    check_pairings(case(), torch.float32, LAYOUTS["batched"], frozen=frozen)


def test_an_input_without_gradient() -> None:
    check_pairings(case(), torch.float32, LAYOUTS["batched"], input_grad=False)


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float64], ids=str)
def test_autocast(input_dtype: torch.dtype) -> None:
    check_pairings(
        case(),
        torch.float32,
        LAYOUTS["batched"],
        autocast=torch.bfloat16,
        input_dtype=input_dtype,
    )


@pytest.mark.parametrize("input_dtype", DTYPES, ids=str)
def test_an_input_of_another_dtype_than_the_weights(input_dtype: torch.dtype) -> None:
    check_pairings(case(), torch.float32, LAYOUTS["batched"], input_dtype=input_dtype)


@pytest.mark.parametrize(
    "positions", [torch.tensor([3, 0, 90, 1]), torch.tensor([[0, 1, 2, 3], [7, 7, 0, 1]])], ids=len
)
def test_given_positions(positions: Tensor) -> None:
    seq = build(case("partial"), torch.float64)
    x = torch.randn(2, 4, 48, dtype=torch.float64, requires_grad=True)
    norm, rotary = seq
    expected = rotary.reference(norm.reference(x), positions=positions)
    dy = torch.randn_like(expected)
    wrt = [x, *seq.parameters()]
    truth = torch.autograd.grad(expected, wrt, dy)
    for forward, backward in PAIRINGS:
        with only(forward=forward, backward=backward):
            y = seq(x, op_kwargs={rotary: {"positions": positions}})
            torch.testing.assert_close(y, expected)
            for got, want in zip(torch.autograd.grad(y, wrt, dy), truth):
                torch.testing.assert_close(got, want)


def test_a_second_backward() -> None:
    seq = build(case(), torch.float32)
    x = torch.randn(2, 3, 48, requires_grad=True)
    loss = seq(x).square().sum()
    wrt = [x, *seq.parameters()]
    first = torch.autograd.grad(loss, wrt, retain_graph=True)
    second = torch.autograd.grad(loss, wrt)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def test_the_gradient_of_the_caller_is_not_written_to() -> None:
    seq = build(case(), torch.float32)
    x, dy = torch.randn(2, 2, 3, 48)
    kept = dy.clone(), x.clone()
    y = seq(x.requires_grad_())
    y.backward(dy)
    assert torch.equal(dy, kept[0])
    assert torch.equal(x, kept[1])


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_into_one_graph() -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    seq = build(case("partial"), torch.float64)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    for length in (3, 5):
        x = torch.randn(2, length, 48, dtype=torch.float64, requires_grad=True)
        dy = torch.randn_like(x)
        results = []
        for run in (compiled, seq):
            y = run(x)
            results.append([y.detach(), *torch.autograd.grad(y, [x, *seq.parameters()], dy)])
        for got, want in zip(*results):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


OTHER_HEADS = {
    "number": RotaryEmbedding(2, 12, num_kv_heads=1),
    "size": RotaryEmbedding(4, 2, num_kv_heads=10),
}


@pytest.mark.parametrize("rotary", OTHER_HEADS.values(), ids=OTHER_HEADS)
def test_refuses_other_heads(rotary: RotaryEmbedding) -> None:
    norm = QKNorm(4, 6, num_kv_heads=2)
    seq = Sequential(norm, rotary)
    x = torch.randn(2, 3, 48, requires_grad=True)
    plan = seq.plan(x)
    text = f"SHAPE: QKNorm has heads (4, 2, 6), RotaryEmbedding {rotary.heads}"
    for name in NAMES:
        assert [str(why) for _, why in plan.record(name).refusals] == [text]
    torch.testing.assert_close(seq(x), rotary.reference(norm.reference(x)))
    for cls in (ForwardQKNormRotary, BackwardQKNormRotary):
        with pytest.raises(
            NotSupportedError, match=r"heads \(4, 2, 6\), RotaryEmbedding.*separate"
        ):
            cls(qk_norm=norm, rotary=rotary)


def test_leaves_other_neighbours_alone() -> None:
    norm, rotary = pair()
    for ops in ([rotary, norm], [norm, Identity(), rotary]):
        seq = Sequential(*ops)
        plan = seq.plan(torch.randn(2, 3, 48, requires_grad=True))
        assert not plan.fused("forward")
        assert not plan.fused("backward")


@pytest.mark.parametrize("at", [0, 1])
def test_leaves_subclasses_alone(at: int) -> None:
    seq = Sequential(*with_subclass(pair(), at))
    plan = seq.plan(torch.randn(2, 3, 48, requires_grad=True))
    for name in NAMES:
        assert not plan.record(name).matches
    assert stopped_by(plan, FORWARD) == (None if at == 0 else "SUBCLASS")


def test_without_gradients_only_forward_is_fused() -> None:
    norm, rotary = pair()
    norm.requires_grad_(False)
    plan = Sequential(norm, rotary).plan(torch.randn(2, 3, 48))
    assert plan.fused("forward") == {FORWARD: 1}
    assert not plan.backward


WRONG = {
    "features": (torch.ones(2, 3, 47), {}),
    "two dimensions": (torch.ones(3, 48), {}),
    "dtype": (torch.ones(2, 3, 48, dtype=torch.int64), {}),
    "positions": (torch.ones(2, 3, 48), {"positions": torch.arange(4)}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_those_of_the_operations(wrong: str) -> None:
    x, kwargs = WRONG[wrong]
    texts = []
    for fused in (True, False):
        seq = Sequential(*pair())
        with only(forward=fused, backward=fused), pytest.raises(InputError) as error:
            seq(x, op_kwargs={1: kwargs})
        texts.append(what(error))
    assert texts[0] == texts[1]


def test_placed_by_the_user() -> None:
    norm, rotary = pair()
    x = torch.randn(2, 3, 48)
    expected = rotary.reference(norm.reference(x))
    torch.testing.assert_close(
        Sequential(ForwardQKNormRotary(qk_norm=norm, rotary=rotary))(x), expected
    )


def test_names() -> None:
    known = {info.name: info.stage for info in opfuser.fusions()}
    assert (known[FORWARD], known[BACKWARD]) == ("forward", "backward")

"""Fusion functions: what they are called with, and results that do not tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from opfuser.errors import PlanError
from opfuser.fusion import Env
from tests.planning.toys import (
    A,
    B,
    Fused,
    FusedForward,
    plan,
    rule,
    spans,
)


def _first_two(ops: Sequence[Any]) -> list[Any]:
    return [Fused(*ops[:2]), *ops[2:]] if len(ops) > 1 else list(ops)


def with_unused(ops: Sequence[Any], **unused: Any) -> list[Any]:
    assert set(unused) == {"recipe", "env"}
    return _first_two(ops)


def with_recipe(ops: Sequence[Any], *, recipe: Any) -> list[Any]:
    assert recipe is None
    return _first_two(ops)


def with_env(ops: Sequence[Any], env: Env) -> list[Any]:
    assert env.needs_backward == (True, True, True)
    assert env.compute_dtype is torch.float32
    return _first_two(ops)


def with_nothing(ops: Sequence[Any]) -> list[Any]:
    return _first_two(ops)


class _Callable:
    __name__ = "object"

    def __call__(self, ops: Sequence[Any], *, recipe: Any = "never") -> list[Any]:
        assert recipe is None
        return _first_two(ops)


@pytest.mark.parametrize(
    "function", [with_unused, with_recipe, with_env, with_nothing, _Callable()]
)
@pytest.mark.parametrize("stage", ["joint", "forward", "backward"])
def test_a_function_gets_the_keywords_that_it_takes(function: Any, stage: Any) -> None:
    made = plan("ABC", function, stage=stage)
    record = made.record(function.__name__)
    assert record.status == "matched"
    assert record.matches == ((0, 1),)
    assert record.stage == stage


def test_a_function_may_return_any_iterable_and_change_its_list() -> None:
    def pops(ops: list[Any]) -> Any:
        first, second = ops.pop(0), ops.pop(0)
        return iter((Fused(first, second), *ops))

    made = plan("ABC", pops)
    assert spans(made.forward) == [(0, 1), (2,)]
    assert len(made.basic_ops) == 3


def test_matches_of_a_function_are_counted_from_what_it_changed() -> None:
    def pairs(ops: Sequence[Any]) -> list[Any]:
        return [Fused(*ops[0:2]), ops[2], Fused(*ops[3:5])]

    def nothing(ops: Sequence[Any]) -> list[Any]:
        return list(ops)

    made = plan("ABCAB", nothing, pairs, nothing)
    assert [(r.status, r.matches) for r in made.history] == [
        ("unmatched", ()),
        ("matched", ((0, 1), (3, 4))),
        ("unmatched", ()),
    ]
    assert made.fused("forward") == {"pairs": 2}


def test_taking_a_fusion_apart_again_is_no_match() -> None:
    def undo(ops: Sequence[Any]) -> list[Any]:
        return [part for op in ops for part in (op.basic_ops if op.is_fused_op else [op])]

    made = plan("AB", rule("A B"), undo)
    assert spans(made.forward) == [(0,), (1,)]
    assert made.record("undo").matches == ()
    assert made.fused("forward") == {}


# ---------------------------------------------------------------------- tiling


def _dropped(ops: Sequence[Any]) -> list[Any]:
    return list(ops[:-1])


def _dropped_inside(ops: Sequence[Any]) -> list[Any]:
    return [ops[0], ops[2]]


def _duplicated(ops: Sequence[Any]) -> list[Any]:
    return [ops[0], *ops]


def _too_many(ops: Sequence[Any]) -> list[Any]:
    return [*ops, ops[-1]]


def _reordered(ops: Sequence[Any]) -> list[Any]:
    return list(ops[::-1])


def _reordered_inside(ops: Sequence[Any]) -> list[Any]:
    return [Fused(ops[1], ops[0]), ops[2]]


def _foreign(ops: Sequence[Any]) -> list[Any]:
    return [*ops[:2], B()]


def _foreign_copy(ops: Sequence[Any]) -> list[Any]:
    return [A(), *ops[1:]]


def _no_operation(ops: Sequence[Any]) -> list[Any]:
    return [ops[0], torch.nn.ReLU(), ops[2]]


def _nothing_at_all(ops: Sequence[Any]) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("function", "what", "received"),
    [
        (_dropped, "nothing covers operation 2", "[A, B]"),
        (_dropped_inside, "A does not fit at operation 1", "[A, A]"),
        (_duplicated, "A does not fit at operation 1", "[A, A, B, A]"),
        (_too_many, "A does not fit at operation 3", "[A, B, A, A]"),
        (_reordered, "A does not fit at operation 0", "[A, B, A]"),
        (_reordered_inside, "Fused does not fit at operation 0", "[Fused, A]"),
        (_foreign, "B does not fit at operation 2", "[A, B, B]"),
        (_foreign_copy, "A does not fit at operation 0", "[A, B, A]"),
        (_no_operation, "returned ReLU, which is no operation", "[A, ReLU, A]"),
        (_nothing_at_all, "nothing covers operation 0", "[]"),
    ],
)
@pytest.mark.parametrize("stage", ["joint", "forward", "backward"])
def test_a_result_that_does_not_tile_is_an_error(
    function: Any, what: str, received: str, stage: Any
) -> None:
    with pytest.raises(PlanError) as error:
        plan("ABA", function, stage=stage)
    text = str(error.value)
    assert text.startswith("A fusion must return operations that tile the basic operations exactly")
    assert f"(fusion {function.__name__!r}, stage {stage}: {what})" in text
    assert f"Received: {received} for basic operations [A, B, A]." in text
    assert "Replace each run by one FusedOperation" in text


@pytest.mark.parametrize("answer", [None, 3])
def test_a_function_that_returns_no_list_is_an_error(answer: Any) -> None:
    def forgets(ops: Sequence[Any]) -> Any:
        return answer

    with pytest.raises(PlanError, match="fusion 'forgets', stage forward"):
        plan("AB", forgets)


def test_a_build_that_covers_something_else_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"fusion 'rule'.*FusedForward does not fit at operation 0"):
        plan("AB", rule("A B", build=lambda a, b: FusedForward(b)))

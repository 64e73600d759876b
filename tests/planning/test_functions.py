"""Fusion functions: what they are called with, and results that do not tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from opfuser.core.fusion import Env
from opfuser.errors import PlanError
from tests.planning.toys import A, B, Fused, FusedForward, plan, rule, spans


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


class _Callable:
    __name__ = "object"

    def __call__(self, ops: Sequence[Any], *, recipe: Any = "never") -> list[Any]:
        assert recipe is None
        return _first_two(ops)


@pytest.mark.parametrize(
    ("function", "stage"),
    [
        (with_unused, "joint"),
        (with_recipe, "forward"),
        (with_env, "backward"),
        (_first_two, "joint"),
        (_Callable(), "forward"),
    ],
)
def test_a_function_gets_the_keywords_that_it_takes(function: Any, stage: Any) -> None:
    record = plan("ABC", function, stage=stage).record(function.__name__)
    assert (record.status, record.matches, record.stage) == ("matched", ((0, 1),), stage)


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


# Results that do not tile the operations A, B, A.

WRONG: list[tuple[Callable[[Sequence[Any]], Any], str, str]] = [
    (lambda ops: list(ops[:-1]), "nothing covers operation 2", "[A, B]"),
    (lambda ops: [ops[0], ops[2]], "A does not fit at operation 1", "[A, A]"),
    (lambda ops: [ops[0], *ops], "A does not fit at operation 1", "[A, A, B, A]"),
    (lambda ops: [*ops, ops[-1]], "A does not fit at operation 3", "[A, B, A, A]"),
    (lambda ops: list(ops[::-1]), "A does not fit at operation 0", "[A, B, A]"),
    (lambda ops: [Fused(ops[1], ops[0]), ops[2]], "Fused does not fit at operation 0",
     "[Fused, A]"),
    (lambda ops: [*ops[:2], B()], "B does not fit at operation 2", "[A, B, B]"),
    (lambda ops: [A(), *ops[1:]], "A does not fit at operation 0", "[A, B, A]"),
    (lambda ops: [ops[0], torch.nn.ReLU(), ops[2]], "returned ReLU, which is no operation",
     "[A, ReLU, A]"),
    (lambda ops: [], "nothing covers operation 0", "[]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "what", "received", "stage"),
    [
        *((*case, "forward") for case in WRONG),
        (*WRONG[0], "joint"),
        (*WRONG[1], "backward"),
    ],
)
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
    with pytest.raises(PlanError, match="fusion '<lambda>', stage forward"):
        plan("AB", lambda ops: answer)


def test_a_build_that_covers_something_else_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"fusion 'rule'.*FusedForward does not fit at operation 0"):
        plan("AB", rule("A B", build=lambda a, b: FusedForward(b)))

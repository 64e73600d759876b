"""Equal layers as one entry: which steps are repeated, and what their names have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import nn

import opfuser
from opfuser.engine.plan import Plan, Step
from opfuser.explain.folding import Fold, joined_names, joined_numbers, like, place_in_layer
from opfuser.explain.plan_view import PlanView
from opfuser.gemm_providers import GemmChoice
from tests.planning.toys import Fused, ops, plan, rule


def named(made: Plan, names: Sequence[str]) -> Plan:
    return replace(made, names=tuple(names))


def folds(letters: str, *rules: opfuser.Fusion, names: Sequence[str] = ()) -> list[Fold]:
    found = PlanView(named(plan(letters, *rules), names)).folds("forward")
    assert [n for part in found for n in range(part.start, part.stop)] == list(
        range(len(plan(letters, *rules).forward))
    ), "every step belongs to one entry, in order"
    return list(found)


@pytest.mark.parametrize(
    ("letters", "found"),
    [
        ("", []),
        ("ABC", [Fold(0, 1, 1), Fold(1, 1, 1), Fold(2, 1, 1)]),
        ("CABABABC", [Fold(0, 1, 1), Fold(1, 2, 3), Fold(7, 1, 1)]),
        ("AAAA", [Fold(0, 1, 4)]),
        ("AABAAB", [Fold(0, 3, 2)]),  # the longest stretch, not the first repetition
        ("ABABA", [Fold(0, 2, 2), Fold(4, 1, 1)]),
        ("ABACABABAB", [Fold(0, 1, 1), Fold(1, 1, 1), Fold(2, 1, 1), Fold(3, 1, 1), Fold(4, 2, 3)]),
    ],
)
def test_steps_that_repeat(letters: str, found: list[Fold]) -> None:
    assert folds(letters) == found


def test_a_step_that_reaches_into_the_layer_before_is_that_of_the_first_layer() -> None:
    """Layers A B C: the C of each but the last is fused into the next one's A."""
    pair = rule("C? A", "joint")
    assert folds("ABCABCABC", pair) == [Fold(0, 2, 3), Fold(6, 1, 1)]
    made = plan("ABCABCABC", pair)
    assert [step.indices for step in made.forward[::2]] == [(0,), (2, 3), (5, 6), (8,)]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("another word", ["a.0.x", "a.0.y", "b.0.x", "b.0.y"]),
        ("another form", ["a.0.x", "a.0.y", "a.x", "a.y"]),
    ],
)
def test_names_of_layers_differ_in_numbers_alone(what: str, names: list[str]) -> None:
    assert folds("ABAB", names=["0.x", "0.y", "1.x", "1.y"]) == [Fold(0, 2, 2)]
    assert len(folds("ABAB", names=names)) == 4, what


def test_repetitions_begin_where_a_layer_does() -> None:
    """Of what repeats behind an odd layer the rest of that layer is no part."""
    names = [f"{layer}.{n}" for layer in range(4) for n in range(3)]
    assert folds("ACB" + "ABB" * 3, names=names) == [
        Fold(0, 1, 1), Fold(1, 1, 1), Fold(2, 1, 1), Fold(3, 3, 3),
    ]  # fmt: skip
    assert folds("ABBBB", names=["0.0", "0.1", "0.2", "0.3", "0.4"])[-1] == Fold(1, 1, 4)


def test_what_is_said_about_operations_counts() -> None:
    made = plan("ABAB")
    assert PlanView(made).folds("forward") == (Fold(0, 2, 2),)
    for other in (
        replace(made, notes=((2, "something"),)),
        replace(made, quantized=(2,)),
        replace(made, gemms=(GemmChoice("fprop", "mine", None, 2),)),
        replace(made, needs=(None, None, *made.needs[2:])),
        replace(made, forward=(*made.forward[:2], Step(nn.Tanh(), ()), *made.forward[2:])),
        plan([*ops("A"), Fused(*ops("B")), *ops("AB")]),
    ):
        assert max(part.times for part in PlanView(other).folds("forward")) == 1


def test_each_pass_is_folded_by_its_own_steps() -> None:
    made = plan("ABAB", rule("A B", "backward", name="pair"))
    assert PlanView(made).folds("forward") == (Fold(0, 2, 2),)
    assert PlanView(made).folds("backward") == (Fold(0, 1, 1), Fold(1, 1, 1))  # two are no heading


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["norm"], "norm"),
        (["", ""], ""),
        ([f"layers.{n}.mlp.2" for n in range(27)], "layers.0-26.mlp.2"),
        ([f"{n}" for n in range(0, 100, 2)], "[0, 2 ... 98]"),
        ([f"{n}.x" for n in range(0, 100, 2)], "[0, 2 ... 98].x"),
        ([f"{n}.x" for n in (0, 1, 2, 4, 5)], "[0-2, 4-5].x"),
        (["a.0.1", "a.0.2", "a.1.1"], "a.0-1.1-2"),
        (["3", "x"], "[3, x]"),
        (["my-block.1", "my-block.2"], "my-block.1-2"),
    ],
)
def test_names_as_one(names: list[str], joined: str) -> None:
    assert joined_names(names) == joined


def test_numbers_as_text() -> None:
    assert joined_numbers([]) == ""
    assert joined_numbers([4]) == "4"
    assert joined_numbers([0, 2, 4]) == "0, 2, 4"
    squares = [n * n for n in range(12)]
    assert joined_numbers(squares) == "0-1, 4, 9, 16, 25, 36, ..., 121"


def test_names_without_numbers() -> None:
    assert like("layers.3.mlp.0") == like("layers.12.mlp.5") == "layers.*.mlp.*"
    assert like("block1") == place_in_layer("block1") == "block1"
    assert place_in_layer("layers.3.mlp.0") == "layers.*.mlp.0"
    assert place_in_layer("3") == "*"

"""make_plan: order of stages, the record of every attempt, and the plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from opfuser.core.fusion import Refusal
from opfuser.engine.planning import make_plan
from opfuser.registry import registry
from tests.planning.toys import (
    NEEDED,
    Fused,
    FusedBackward,
    FusedForward,
    NothingComputed,
    env,
    ops,
    plan,
    rule,
    spans,
)


def test_make_plan_is_pure() -> None:
    """No tensor is computed, nothing is changed, and the same question has the same answer."""
    run = [opfuser.BasicLinear(4, 4), opfuser.Bias(4), opfuser.ConstantScale(2.0)]
    before = [(dict(op.__dict__), dict(op._parameters)) for op in run]
    arguments = (run, env(3), (NEEDED,) * 3, list(registry))
    switched = dict(registry.switched)
    with NothingComputed(), opfuser.enable(*(handle.name for handle in registry)):
        one, two = make_plan(*arguments), make_plan(*arguments)
    assert one == two
    assert [(dict(op.__dict__), dict(op._parameters)) for op in run] == before
    assert registry.switched == switched


def test_without_fusions_every_operation_is_a_step() -> None:
    made = plan("ABC")
    assert spans(made.forward) == spans(made.backward) == [(0,), (1,), (2,)]
    assert made.history == ()
    assert made.fused("forward") == made.fused("backward") == {}
    with pytest.raises(KeyError):
        made.record("rule")
    made = plan("", rule("A"))
    assert made.forward == made.backward == ()


def test_passes_are_fused_apart() -> None:
    made = plan("ABC", rule("A B", name="ab"), rule("B C", "backward", name="bc"))
    assert spans(made.forward) == [(0, 1), (2,)]
    assert spans(made.backward) == [(0,), (1, 2)]
    assert made.fused("forward") == {"ab": 1}
    assert made.fused("backward") == {"bc": 1}
    assert [record.status for record in made.history] == ["matched", "matched"]


def test_joint_fusions_come_first() -> None:
    """Registered last, tried first; the other stages start from what it made."""
    made = plan(
        "AB",
        rule("A B", name="ab"),
        rule("A B", "backward", name="ba"),
        rule("A B", "joint", name="both"),
    )
    assert made.fused("forward") == made.fused("backward") == {"both": 1}
    assert [(r.name, r.status) for r in made.history] == [
        ("both", "matched"),
        ("ab", "unmatched"),
        ("ba", "unmatched"),
    ]
    assert made.forward[0].op is made.backward[0].op
    assert made.record("both").matches == ((0, 1),)


def test_the_order_of_registration_is_precedence() -> None:
    short, long = rule("A B", name="short"), rule("A B C", name="long")
    assert plan("ABC", short, long).fused("forward") == {"short": 1}
    assert plan("ABC", long, short).fused("forward") == {"long": 1}
    near = plan("ABC", short, long).record("long").near_miss
    assert near is None or near.stopped_by.code == "CONFLICT"


def test_later_fusions_may_build_on_earlier_ones() -> None:
    def grow(ops: Sequence[Any]) -> list[Any]:
        return [Fused(*ops)] if len(ops) == 2 else list(ops)

    made = plan("ABC", rule("A B"), grow)
    assert spans(made.forward) == [(0, 1, 2)]
    assert made.fused("forward") == {"grow": 1}


@pytest.mark.parametrize(
    ("made_by", "forward", "backward"),
    [
        (Fused, [(0, 1), (2,)], [(0, 1), (2,)]),
        (FusedForward, [(0, 1), (2,)], [(0,), (1,), (2,)]),
        (FusedBackward, [(0,), (1,), (2,)], [(0, 1), (2,)]),
    ],
)
def test_a_fused_operation_without_a_kernel_for_a_pass_is_its_parts_there(
    made_by: Any, forward: Any, backward: Any
) -> None:
    by_user = plan([made_by(*ops("AB")), *ops("C")])
    by_fusion = plan("ABC", rule("A B", "joint", build=made_by))
    for made in (by_user, by_fusion):
        assert spans(made.forward) == forward
        assert spans(made.backward) == backward


def test_a_fused_operation_that_the_user_placed_stays() -> None:
    mine = Fused(*ops("AB"))
    made = plan([mine, *ops("AB")], rule("A B"))
    assert made.forward[0].op is mine
    assert made.forward[0].fusion is None
    assert made.fused("forward") == {"rule": 1}


# Equality.


@pytest.fixture
def built_in() -> Iterator[None]:
    with opfuser.enable(*(handle.name for handle in registry)):
        yield


def model(factor: float = 2.0) -> opfuser.Sequential:
    residual = opfuser.Residual(opfuser.Linear(4, 4), opfuser.ConstantScale(factor))
    return opfuser.Sequential(residual, nn.Tanh(), opfuser.LayerNorm(4))


@pytest.mark.usefixtures("built_in")
def test_plans_of_equal_models_are_equal() -> None:
    """Whatever their weights, and however long planning took."""
    x = torch.randn(3, 4, requires_grad=True)
    one, two = model().plan(x), model(3.0).plan(x)
    assert one == two
    assert one is not two
    assert hash(one) == hash(two)
    assert {one: "found"}[two] == "found"
    assert one.forward == two.forward
    assert [r.elapsed for r in one.history] != [r.elapsed for r in two.history]
    called = model()
    called(x)
    assert called.last_plan == one
    assert one != str(one)


def other_plans() -> dict[str, opfuser.Plan]:
    x = torch.randn(3, 4, requires_grad=True)
    named = opfuser.Sequential(dict(zip("abc", model())))
    with opfuser.disable("backward_linear_add"):
        switched = model().plan(x)
    sigmoid = model()
    sigmoid[1] = nn.Sigmoid()
    return {
        "names": named.plan(x),
        "another plain module": sigmoid.plan(x),
        "input without grad": model().plan(x.detach()),
        "dtype": model().double().plan(x.detach().double().requires_grad_()),
        "a fusion switched off": switched,
    }


@pytest.mark.usefixtures("built_in")
def test_plans_that_say_something_else_differ() -> None:
    plans = {**other_plans(), "plain": model().plan(torch.randn(3, 4, requires_grad=True))}
    same = [(a, b) for a in plans for b in plans if a < b and plans[a] == plans[b]]
    assert same == []


def test_steps_and_records_are_part_of_a_plan() -> None:
    one, two = plan("ABC", rule("A B")), plan("ABC", rule("A B"))
    assert one == two
    step, record = one.forward[0], one.history[0]
    assert step == replace(step, op=two.forward[0].op)
    for other in (
        replace(step, op=one.forward[1].op), replace(step, indices=(0,)),
        replace(step, fusion="another"),
    ):  # fmt: skip
        assert step != other
        assert one != replace(two, forward=(other, *two.forward[1:]))
        assert one != replace(two, backward=(other, *two.backward[1:]))
    assert record == replace(record, elapsed=1.0)
    assert one == replace(two, history=(replace(record, elapsed=1.0),))
    assert one != replace(two, history=(replace(record, detail="another"),))
    assert one != replace(two, forward=(replace(step, path="another"), *two.forward[1:]))
    assert one != replace(two, needs=(None, *two.needs[1:]))
    assert one != replace(two, env=replace(two.env, dtype=torch.float64))


# Records.


def test_indices_of_records_count_basic_operations() -> None:
    """A scan sees a list that is shorter by what earlier fusions took."""
    no = Refusal("SHAPE", "odd")
    made = plan(
        "ABACBA", rule("A B"), rule("A C", name="second", refuses=lambda a, c, env: no),
        rule("B A B", name="third"),
    )  # fmt: skip
    assert made.record("second").refusals == ((2, no),)
    near = made.record("third").near_miss
    assert near is not None
    assert (near.start, near.matched) == (4, 2)


def test_near_misses_are_kept_at_every_place() -> None:
    """Also beside matches. Of those that end at one operation the longest is kept."""
    made = plan("ABC AAB AABA".replace(" ", ""), rule("A A? B C"))
    record = made.record("rule")
    assert record.matches == ((0, 1, 2),)
    assert [(m.start, m.matched, m.stopped_by.detail) for m in record.near_misses] == [
        (3, 3, "C is expected where A stands"),
        (6, 3, "C is expected where A stands"),
        (9, 1, "the run of operations ends where B is expected"),
    ]
    assert record.near_misses[0].stopped_by is record.near_misses[1].stopped_by


@pytest.mark.parametrize(
    ("stage", "needs", "status"),
    [
        ("backward", (True, True), "matched"),
        ("backward", (False, True), "refused"),
        ("joint", (True, True), "matched"),
        ("joint", (False, True), "refused"),
        ("joint", (False, False), "matched"),
        ("forward", (False, True), "matched"),
        ("forward", (False, False), "matched"),
    ],
)
def test_no_grad_is_a_reason(stage: Any, needs: tuple[bool, ...], status: str) -> None:
    record = plan("AB", rule("A B", stage), needs=needs).record("rule")
    assert record.status == status
    assert [no.code for _, no in record.refusals] == (["NO_GRAD"] if status == "refused" else [])


def test_every_registered_fusion_has_a_record() -> None:
    """Hazard 18: also those of a pass that this plan does not have."""
    made = plan("AB", rule("A B", "backward"), needs=(False, False))
    assert [(r.name, r.matches) for r in made.history] == [("rule", ())]
    assert made.backward == ()
    assert made.fused("backward") == {}


def test_there_are_at_most_as_many_near_misses_as_operations() -> None:
    """Also of a pattern that begins anywhere and takes as much as it can."""
    made = plan("A" * 300, rule("A* B"))
    assert [(m.start, m.matched) for m in made.record("rule").near_misses] == [(0, 300)]
    assert len(plan("AC" * 150, rule("A B")).record("rule").near_misses) == 150

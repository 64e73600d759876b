"""make_plan: order of stages, the record of every attempt, and results that do not tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser
from opfuser.errors import PlanError
from opfuser.fusion import Env, Refusal, Requires
from opfuser.plan import make_plan
from opfuser.registry import registry
from tests.planning.toys import (
    NEEDED,
    A,
    B,
    Fused,
    FusedBackward,
    FusedForward,
    env,
    handles,
    ops,
    plan,
    rule,
    spans,
)


class _NothingComputed(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran while a plan was made")


def test_make_plan_is_pure() -> None:
    """No tensor is computed, nothing is changed, and the same question has the same answer."""
    run = [opfuser.BasicLinear(4, 4), opfuser.Bias(4), opfuser.ConstantScale(2.0)]
    before = [(dict(op.__dict__), dict(op._parameters)) for op in run]
    arguments = (run, env(3), (NEEDED,) * 3, list(registry))
    switched = dict(registry.switched)
    with _NothingComputed(), opfuser.enable(*(handle.name for handle in registry)):
        one, two = make_plan(*arguments), make_plan(*arguments)
    assert [(s.indices, s.fusion, type(s.op)) for s in one.forward + one.backward] == [
        (s.indices, s.fusion, type(s.op)) for s in two.forward + two.backward
    ]
    assert [r.summary().split(" time")[0] for r in one.history] == [
        r.summary().split(" time")[0] for r in two.history
    ]
    assert [(dict(op.__dict__), dict(op._parameters)) for op in run] == before
    assert registry.switched == switched


def test_without_fusions_every_operation_is_a_step() -> None:
    made = plan("ABC")
    assert spans(made.forward) == spans(made.backward) == [(0,), (1,), (2,)]
    assert made.history == ()
    assert made.fused("forward") == made.fused("backward") == {}


def test_no_operations() -> None:
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
    order: list[str] = []

    def note(name: str) -> Callable[..., Any]:
        return lambda ops: order.append(name) or ops

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


# ---------------------------------------------------------------------- records


def test_refusals_are_recorded_with_code_and_sentence() -> None:
    no = Refusal("DTYPE", "weight is float32; the kernel takes bf16")
    made = plan("CABAB", rule("A B", refuses=lambda a, b, env: no))
    record = made.record("rule")
    assert record.status == "refused"
    assert record.refusals == ((1, no), (3, no))
    assert record.matches == ()
    assert "op 1: DTYPE: weight is float32; the kernel takes bf16" in str(made)


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


def test_near_misses_are_recorded_and_shown() -> None:
    made = plan("AC", rule("A B"))
    record = made.record("rule")
    assert record.status == "unmatched"
    assert record.near_miss is not None
    assert "closest: 1 of 2 at op 0; LAYOUT: B is expected where C stands" in str(made)


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


def test_without_backward_its_fusions_are_not_tried() -> None:
    made = plan("AB", rule("A B", "backward"), needs=(False, False))
    assert made.backward == ()
    assert made.fused("backward") == {}


def test_every_registered_fusion_has_a_record() -> None:
    """Also those of a pass that this plan does not have."""
    made = plan("AB", rule("A B", "backward"), needs=(False, False))
    assert [r.name for r in made.history] == ["rule"]


@pytest.mark.parametrize(
    ("requires", "detail"),
    [
        (Requires(device="cuda"), "needs cuda, have cpu"),
        (Requires(package="no_such_package_here"), "needs the package no_such_package_here"),
    ],
)
def test_what_the_machine_lacks_is_recorded(requires: Requires, detail: str) -> None:
    made = plan("AB", rule("A B", requires=requires))
    record = made.record("rule")
    assert (record.status, record.detail) == ("skipped", detail)
    assert record.summary() == f"[stage=forward, fusion=rule] skipped ({detail})"
    assert spans(made.forward) == [(0,), (1,)]


def test_a_fusion_that_is_off_by_default() -> None:
    record = plan("AB", rule("A B", enabled=False)).record("rule")
    assert record.status == "disabled"
    assert record.matches == ()


def test_no_record_of_that_name() -> None:
    with pytest.raises(KeyError):
        plan("AB").record("rule")


# ---------------------------------------------------------------------- opaque functions


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


# ---------------------------------------------------------------------- as text


def test_a_plan_reads_well() -> None:
    made = plan(
        "ABC", rule("A B", name="ab"), rule("B C", "backward", name="bc"),
        rule("C C", "backward", name="cc", requires=Requires(device="cuda")),
    )  # fmt: skip
    text = str(made).splitlines()
    assert text[:8] == [
        "Plan for 3 basic operations (torch.float32, cpu, autocast off, grad on)",
        "forward:",
        "  0-1  A + B  -> FusedForward [ab]",
        "  2    C",
        "backward:",
        "  1-2  B + C  -> FusedBackward [bc]",
        "  0    A",
        "fusions:",
    ]
    assert text[8].startswith("  [stage=forward, fusion=ab] [SUMMARY] matches=1 refused=0 time=")
    assert text[9].startswith("  [stage=backward, fusion=bc] [SUMMARY] matches=1 refused=0 time=")
    assert text[10:] == ["  [stage=backward, fusion=cc] skipped (needs cuda, have cpu)"]


def test_a_plan_without_backward_reads_well() -> None:
    assert "backward: none\nfusions:" in str(plan("A", needs=(False,)))


def test_names_of_operations_are_shown() -> None:
    seq = opfuser.Sequential(
        {"up": opfuser.Linear(2, 2), "tap": opfuser.Sequential(opfuser.Identity())}
    )
    text = str(seq.plan(torch.ones(1, 2)))
    assert "  0  up BasicLinear\n  1  up Bias\n  2  tap.0 Identity" in text


def test_plans_of_handles_that_are_not_registered() -> None:
    """make_plan takes the handles that it is given: nothing global decides."""
    (handle,) = handles(rule("A B"))
    made = make_plan(ops("AB"), env(2), (NEEDED, NEEDED), [handle])
    assert made.fused("forward") == {"rule": 1}
    assert handle not in registry

"""The one scan that matches patterns."""

from __future__ import annotations

from typing import Any

import pytest

import opfuser
from opfuser.core.fusion import Fusion, Optional, Refusal, Repeated
from opfuser.errors import FusionError
from opfuser.op import FusedOperation
from tests.planning.toys import A, B, Compound, Fused, env, ops, pattern, plan, rule

MATCHES = {
    "exact": ("A B", "AB", [(0, 2)]),
    "one operation": ("A", "BAA", [(1, 2), (2, 3)]),
    "none": ("A B", "BA", []),
    "incomplete at the end": ("A B", "BBA", []),
    "shorter than the pattern": ("A B C", "AB", []),
    "no operations": ("A", "", []),
    "several": ("A B", "ABCAB", [(0, 2), (3, 5)]),
    "greedy from the left": ("A A", "AAA", [(0, 2)]),
    "overlapping": ("A B A", "ABABA", [(0, 3)]),
    "a failed start is skipped": ("A B", "AAB", [(1, 3)]),
    "subclass": ("A B", "SB", []),
    "subclass asked for": ("S B", "SBAB", [(0, 2)]),
    "alternatives": ("A|B C", "ACBC", [(0, 2), (2, 4)]),
    "optional at the start": ("A? B", "ABB", [(0, 2), (2, 3)]),
    "optional in the middle": ("A B? C", "ABCAC", [(0, 3), (3, 5)]),
    "optional at the end": ("A B?", "ABA", [(0, 2), (2, 3)]),
    "two optional ones in a row": ("A B? C?", "ACABCA", [(0, 2), (2, 5), (5, 6)]),
    "optional alternatives": ("A B|C?", "ABACA", [(0, 2), (2, 4), (4, 5)]),
    "optional left out where taking it fails": ("A? A B", "AB", [(0, 2)]),
    "optional taken where both fit": ("A? A", "AA", [(0, 2)]),
    "repeated": ("A+ B", "AAABAB", [(0, 4), (4, 6)]),
    "repeated alternatives": ("A|B++", "ABACBCAA", [(0, 3), (6, 8)]),
    "repeated too few times": ("A++", "ABA", []),
    "repeated at the end": ("B A+", "BAABA", [(0, 3), (3, 5)]),
    "repeated leaves what follows its own": ("A+ A B", "AAAB", [(0, 4)]),
    "repeated no times": ("A* B", "BAAB", [(0, 1), (1, 4)]),
    "repeated between": ("A B* C", "ABBCAC", [(0, 4), (4, 6)]),
}


@pytest.mark.parametrize("case", MATCHES)
def test_where_a_pattern_matches(case: str) -> None:
    """Hazard 5: never an operation of a subclass; for each fusion, see tests/fused."""
    text, letters, expected = MATCHES[case]
    run = ops(letters)
    scan = rule(text).scan(run, env())
    assert [(m.start, m.stop) for m in scan.matches] == expected
    covered = [b for op in scan.ops for b in (op.basic_ops if op.is_fused_op else [op])]
    assert [id(op) for op in covered] == [id(op) for op in run]
    assert sum(op.is_fused_op for op in scan.ops) == len(expected)


@pytest.mark.parametrize(
    ("text", "letters", "sizes"),
    [
        ("A B? C", "ABC", [1, 1, 1]),
        ("A B? C", "AC", [1, None, 1]),
        ("A? A", "A", [None, 1]),
        ("A B? B?", "AB", [1, 1, None]),
        ("A+ B", "AAB", [(2,), 1]),
        ("A* B", "B", [(0,), 1]),
        ("A+ A", "AAA", [(2,), 1]),
    ],
)
def test_refuses_and_build_receive_one_argument_per_element(
    text: str, letters: str, sizes: list[Any]
) -> None:
    """An operation, None, or a tuple of operations for one that is repeated."""
    seen: list[tuple[Any, ...]] = []

    def refuses(*parts: Any, env: Any) -> None:
        assert env.device.type == "cpu"
        seen.append(parts)

    def build(*parts: Any) -> FusedOperation:
        seen.append(parts)
        return Fused(*parts)

    given = ops(letters)
    rule(text, refuses=refuses, build=build).scan(given, env())
    asked, built = seen
    assert asked == built
    flat = [op for part in built for op in (part if isinstance(part, tuple) else (part,))]
    assert [op for op in flat if op is not None] == given
    found = [(len(p),) if isinstance(p, tuple) else None if p is None else 1 for p in built]
    assert found == sizes


def test_a_compound_in_a_pattern_means_its_parts() -> None:
    """Hazard 21."""
    fusion = Fusion("rule", "forward", (Compound, *pattern("C")), Fused)
    found = [(m.start, m.stop) for m in fusion.scan(ops("ACABCBC"), env()).matches]
    assert found == [(0, 2), (2, 5)]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_in_a_pattern_means_its_parts(bias: bool) -> None:
    linear = opfuser.Linear(3, 3, bias=bias, device="meta")
    seen: list[Any] = []

    def build(weight: Any, bias: Any, scale: Any) -> FusedOperation:
        seen.append((weight, bias, scale))
        return Fused(weight, bias, scale)

    scale = opfuser.ConstantScale(2.0)
    fusion = Fusion("rule", "forward", (opfuser.Linear, opfuser.ConstantScale), build)
    scan = fusion.scan([*linear.basic_ops, scale], env())
    assert len(scan.matches) == 1
    assert seen == [(linear.basic_ops[0], linear.basic_ops[1] if bias else None, scale)]


@pytest.mark.parametrize(
    ("elements", "text"),
    [
        ((), "at least one element that is not optional"),
        ((Optional(A),), "at least one element that is not optional"),
        ((Repeated("any", bool, at_least=0),), "at least one element that is not optional"),
        ((A, int), "Received: <class 'int'>"),
        ((A, "B"), "Received: 'B'"),
        ((A, ()), "Received: ()"),
        ((A, (B, 3)), "operation classes, tuples of them, Optional"),
        # A compound never reaches a fusion: this could not match, and nobody would know.
        ((A, Optional(Compound)), "Compound"),
        ((A, (Compound, A)), "Compound"),
    ],
)
def test_a_pattern_of_something_else_is_an_error(elements: tuple[Any, ...], text: str) -> None:
    with pytest.raises(FusionError) as error:
        Fusion("mine", "forward", elements, Fused)
    assert text in str(error.value)
    assert "fusion 'mine'" in str(error.value)


def test_an_unknown_stage_is_an_error() -> None:
    with pytest.raises(FusionError, match=r"one of joint, forward, backward.*Received: 'both'"):
        Fusion("mine", "both", (A,), Fused)  # type: ignore[arg-type]


def test_refusals_are_kept_and_the_scan_goes_on() -> None:
    """A refused match at one place does not hide one that starts inside it."""
    first: list[Any] = []

    def refuses(a: Any, b: Any, *, env: Any) -> Refusal | None:
        first.append(a)
        return Refusal("SHAPE", "odd") if len(first) == 1 else None

    scan = rule("A A", refuses=refuses).scan(ops("AAA"), env())
    assert scan.refusals == [(0, Refusal("SHAPE", "odd"))]
    assert [(m.start, m.stop) for m in scan.matches] == [(1, 3)]


@pytest.mark.parametrize("answer", [Refusal("WHIM", "no"), "no", True, ("DTYPE", "no")])
def test_a_refusal_of_an_unknown_kind_is_an_error(answer: Any) -> None:
    with pytest.raises(FusionError, match=r"fusion 'rule'.*Use one of .*DTYPE") as error:
        rule("A", refuses=lambda a, env: answer).scan(ops("A"), env())
    assert repr(answer) in str(error.value)


NEAR_MISSES = {
    "another operation": ("A B", "AC", (0, 1, 2), "LAYOUT", "B is expected where C stands"),
    "end of the run": ("A B", "CA", (1, 1, 2), "GROUP_SPLIT", "ends where B is expected"),
    "subclass": ("B A", "BS", (0, 1, 2), "SUBCLASS", "SubA is a subclass of A"),
    "the longest counts": ("A B C", "ACABA", (2, 2, 3), "LAYOUT", "C is expected where A"),
    "the first of equals": ("A B", "ACAA", (0, 1, 2), "LAYOUT", "where C stands"),
    "alternatives": ("A B|C", "AA", (0, 1, 2), "LAYOUT", "B|C is expected where A stands"),
    "a skipped element has not matched": ("A B? C", "AA", (0, 1, 3), "LAYOUT", "where A stands"),
    "a run that is too short": ("A++ B", "CAC", (1, 1, 2), "LAYOUT", "A is expected where C"),
    "after a run": ("A+ B", "AAC", (0, 2, 2), "LAYOUT", "B is expected where C stands"),
    "a taken element has": ("A B? C", "ABA", (0, 2, 3), "LAYOUT", "C is expected where A stands"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_the_closest_miss_is_kept(case: str) -> None:
    """Hazard 18."""
    text, letters, where, code, detail = NEAR_MISSES[case]
    near = rule(text).scan(ops(letters), env()).near_miss
    assert near is not None
    assert (near.start, near.matched, near.of) == where
    assert near.stopped_by.code == code
    assert detail in near.stopped_by.detail


def test_a_miss_on_what_another_fusion_took() -> None:
    taken = Fused(*ops("BC"))
    near = rule("A B").scan([A(), taken], env()).near_miss
    assert near is not None
    assert near.stopped_by == Refusal("CONFLICT", "B is already part of Fused")
    for text, letters in (("A B", "CC"), ("A? B", "CC"), ("A B", "")):  # nothing fits
        assert rule(text).scan(ops(letters), env()).near_miss is None


def test_a_fusion_is_a_fusion_function() -> None:
    run = ops("ABA")
    for kwargs in ({}, {"recipe": None}, {"env": env()}):
        (fused, last) = rule("A B")(run, **kwargs)
        assert list(fused.basic_ops) == run[:2]
        assert last is run[2]
    assert len(run) == 3


def test_refuses_may_look_at_what_is_behind() -> None:
    seen: list[str] = []

    def refuses(a: A, *, env: Any, behind: Any) -> Refusal | None:
        seen.append("".join(type(op).__name__ for op in behind))
        return Refusal("CONFLICT", "left to B") if seen[-1].startswith("B") else None

    made = plan("ABAA", Fusion("rule", "forward", (A,), Fused, refuses=refuses))
    assert seen == ["BAA", "A", ""]
    assert made.record("rule").matches == ((2,), (3,))
    assert made.record("rule").refusals == ((0, Refusal("CONFLICT", "left to B")),)

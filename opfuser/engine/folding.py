"""Equal steps of a plan, found as data: a layer that occurs 27 times is one entry."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from .plan import Plan, Step

__all__ = ["Fold", "fold", "joined_names", "joined_numbers", "like"]


class Fold(NamedTuple):
    """Consecutive steps of a pass, and how often they are repeated without a gap.

    Repetition ``r`` consists of ``steps[start + r * period : start + (r + 1) * period]``. Its steps
    have the types of operations, fusions and notes of the first repetition, and names that differ
    in numbers alone. Only the first step of the first repetition may cover fewer operations at its
    beginning than those of the others: a fusion that reaches into the layer before does not do so
    in the first layer.

    Attributes:
        start: position of the first step in the pass, in forward order.
        period: steps of one repetition.
        times: repetitions; 1 for steps that are not repeated.
    """

    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        """Position behind the last step."""
        return self.start + self.period * self.times


def fold(plan: Plan, stage: Literal["forward", "backward"]) -> tuple[Fold, ...]:
    """The steps of a pass, in forward order, with equal layers as one entry.

    Every step belongs to exactly one entry. Of the repetitions that begin at a step the longest
    stretch is taken, and of equally long ones that of the shortest period.

    Args:
        plan: a plan.
        stage: whose pass.
    """
    steps = plan.forward if stage == "forward" else plan.backward
    numbers: dict[Hashable, int] = {}
    rows = [_row(plan, step, numbers) for step in steps]
    folds: list[Fold] = []
    at = 0
    while at < len(rows):
        found = _longest(rows, at)
        folds.append(found)
        at = found.stop
    return tuple(folds)


class _Row(NamedTuple):
    """What a step must share with another one to be equal: numbers that stand for it."""

    kind: int
    ops: tuple[int, ...]


def _row(plan: Plan, step: Step, numbers: dict[Hashable, int]) -> _Row:
    def number(what: Hashable) -> int:
        return numbers.setdefault(what, len(numbers))

    notes, quantized = dict(plan.notes), set(plan.quantized)
    names = plan.names or ("",) * len(plan.basic_ops)
    ops = tuple(
        number(
            (type(plan.basic_ops[i]), like(names[i]), notes.get(i), i in quantized,
             plan.needs[i] is None)
        )
        for i in step.indices
    )  # fmt: skip
    return _Row(number((type(step.op), step.fusion, like(step.path))), ops)


def _longest(rows: Sequence[_Row], at: int) -> Fold:
    best = Fold(at, 1, 1)
    for period in range(1, (len(rows) - at) // 2 + 1):
        if not _begins_like(rows[at], rows[at + period]):
            continue
        same = 1
        while at + same + period < len(rows) and rows[at + same] == rows[at + same + period]:
            same += 1
        times = 1 + same // period
        if times > 1 and times * period > best.period * best.times:
            best = Fold(at, period, times)
    return best


def _begins_like(first: _Row, other: _Row) -> bool:
    """Whether a step is another one, up to operations at its beginning that it lacks."""
    missing = len(other.ops) - len(first.ops)
    if first.kind != other.kind or missing < 0:
        return False
    return first.ops == other.ops[missing:] and bool(first.ops or not missing)


def like(name: str) -> str:
    """A name without its numbers: ``layers.*.mlp.*`` for ``layers.3.mlp.0``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def joined_names(names: Sequence[str]) -> str:
    """Names that differ in numbers alone as one: ``layers.0-26.norm``.

    Numbers without a gap are a range; others are listed, or, in steps of equal size, end at the
    last one: ``0, 2 ... 98``. A list beside other parts is in brackets.

    Args:
        names: in order, of one form.
    """
    columns = list(zip(*(name.split(".") for name in names)))
    parts = [_joined_parts(list(dict.fromkeys(column))) for column in columns]
    if len(parts) == 1:
        return parts[0]
    return ".".join(f"[{part}]" if "," in part else part for part in parts)


def _joined_parts(parts: Sequence[str]) -> str:
    if not all(part.isdecimal() for part in parts):
        return ", ".join(parts)
    return joined_numbers(list(map(int, parts)))


def joined_numbers(numbers: Sequence[int]) -> str:
    """Numbers as text: ``0-26``, ``0, 2 ... 98`` in steps of one size, ``3, 7, 12`` else."""
    first, last = numbers[0], numbers[-1]
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) == 1:
        return str(first)
    if steps == {1}:
        return f"{first}-{last}"
    if len(steps) == 1 and len(numbers) > 3:
        return f"{first}, {numbers[1]} ... {last}"
    return ", ".join(map(str, numbers))

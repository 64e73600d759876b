"""Equal rows as one entry, as a layer that occurs 27 times; and their names as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..engine.plan import together


class Fold(NamedTuple):
    """Consecutive steps of a pass, and how often they are repeated without a gap.

    Repetition ``r`` consists of ``steps[start + r * period : start + (r + 1) * period]``. Its steps
    have the types of operations, dtypes of parameters, fusions, GEMM providers and notes of the
    first repetition, and names that differ in numbers alone. Only the first step of the first
    repetition may cover fewer operations at its beginning than those of the others: a fusion that
    reaches into the layer before does not do so in the first layer.

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


def repeated(rows: Sequence[Row]) -> tuple[Fold, ...]:
    """The rows in order, with those that are repeated as one entry."""
    folds: list[Fold] = []
    at = 0
    while at < len(rows):
        found = _longest(rows, at)
        layers = [row.layer for row in rows[at : found.stop]]
        if at and layers[0] and layers[0] == rows[at - 1].layer and len(set(layers)) > 1:
            found = Fold(at, 1, 1)  # what repeats begins with a layer, not within one
        # One line saved is not worth a heading.
        single = found.period * (found.times - 1) < 2
        folds += [Fold(n, 1, 1) for n in range(at, found.stop)] if single else [found]
        at = found.stop
    return tuple(folds)


class Row(NamedTuple):
    """A step, or several, as what they are compared by.

    Attributes:
        kind: equal for those that may be equal.
        ops: a number for each operation, equal for those that may be equal.
        layer: that the last operation is in.
    """

    kind: Hashable
    ops: tuple[int, ...]
    layer: str

    def equals(self, other: Row) -> bool:
        """Whether both are of one kind, with equal operations."""
        return self[:2] == other[:2]


def layer_of(name: str) -> str:
    """The beginning of a name down to its first number, if more follows it."""
    parts = name.split(".")
    numbers = (n for n, part in enumerate(parts[:-1]) if part.isdecimal())
    return ".".join(parts[: next(numbers, -1) + 1])


def _longest(rows: Sequence[Row], at: int) -> Fold:
    best = Fold(at, 1, 1)
    for period in range(1, (len(rows) - at) // 2 + 1):
        if not _begins_like(rows[at], rows[at + period]):
            continue
        same = 1
        while at + same + period < len(rows) and rows[at + same].equals(rows[at + same + period]):
            same += 1
        times = 1 + same // period
        if times > 1 and times * period > best.period * best.times:
            best = Fold(at, period, times)
    return best


def _begins_like(first: Row, other: Row) -> bool:
    """Whether a step is another one, up to operations at its beginning that it lacks."""
    missing = len(other.ops) - len(first.ops)
    if first.kind != other.kind or missing < 0:
        return False
    return first.ops == other.ops[missing:] and bool(first.ops or not missing)


def like(name: str) -> str:
    """A name without its numbers: ``layers.*.mlp.*`` for ``layers.3.mlp.0``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def place_in_layer(name: str) -> str:
    """A name without its first number, which says the layer: ``layers.*.mlp.0``."""
    parts = name.split(".")
    first = next((n for n, part in enumerate(parts) if part.isdecimal()), None)
    return name if first is None else ".".join([*parts[:first], "*", *parts[first + 1 :]])


class NamePart(NamedTuple):
    """What stands between two dots of joined names.

    Attributes:
        text: the part, or the numbers that it is in several names.
        varies: whether it is not the same in all.
    """

    text: str
    varies: bool

    @property
    def is_number(self) -> bool:
        """Whether it is a number in every name."""
        return self.varies or self.text.isdecimal()

    def __str__(self) -> str:
        return f"[{self.text}]" if self.varies and "," in self.text else self.text


def joined_parts(names: Sequence[str]) -> tuple[NamePart, ...]:
    """The parts of names that differ in numbers alone, joined as by :func:`joined_numbers`."""
    columns = zip(*(name.split(".") for name in names))
    return tuple(_joined(list(dict.fromkeys(column))) for column in columns)


def varying(name: tuple[NamePart, ...]) -> tuple[NamePart, ...]:
    """The beginning of a joined name down to the number that varies, if more follows it."""
    numbers = (n for n, part in enumerate(name[:-1]) if part.varies)
    return name[: next(numbers, -1) + 1]


def _joined(parts: Sequence[str]) -> NamePart:
    if len(parts) == 1:
        return NamePart(parts[0], False)
    if all(part.isdecimal() for part in parts):
        return NamePart(joined_numbers(list(map(int, parts))), True)
    return NamePart(", ".join(parts), True)


def joined_names(names: Sequence[str]) -> str:
    """Names that differ in numbers alone as one: ``layers.0-26.norm``, ``[0-12, 14-26].norm``.

    Args:
        names: in order, of one form.
    """
    return ".".join(map(str, joined_parts(names)))


def joined_paths(names: Sequence[str], most: int = 4) -> str:
    """Names, those that differ in numbers alone as one; of more than ``most`` the first."""
    texts = [*map(joined_names, together((like(name), name) for name in names).values())]
    return ", ".join(texts[:most] + ["..."] * (len(texts) > most))


def joined_numbers(numbers: Sequence[int]) -> str:
    """Numbers as text: ``0-12, 14-26``; ``0, 2 ... 98`` in steps of one size."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) == 1 and steps != {1} and len(numbers) > 3:
        return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:6], "...", texts[-1]])

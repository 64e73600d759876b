"""What the picture of a plan shows: a column per operation, and equal layers once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..engine.folding import joined_parts, like, repeated, varying
from ..engine.plan import Step
from ..engine.plan_view import PlanView

__all__ = ["Column", "Columns", "Section", "Span", "columns"]


class Column(NamedTuple):
    """A basic operation, or a plain module.

    Attributes:
        op: index of the operation; None for a plain module.
        kind: the name of its class.
        name: its path.
    """

    op: int | None
    kind: str
    name: str


class Span(NamedTuple):
    """A step, and the columns ``start`` to ``stop - 1`` that it covers."""

    start: int
    stop: int
    step: Step


class Section(NamedTuple):
    """Columns that stand for one or more repetitions of a layer.

    Attributes:
        heading: what is repeated, and how often; empty if nothing is.
        layer: what the names of the last shown columns begin with; empty if nothing is repeated.
        repetitions: the columns of each, as start and stop. Only the first may lack some of the
            columns at the beginning of the others.
        shown: which of the repetitions is drawn: the first that lacks none.
        stretches: borders of the shown columns that no step of either pass crosses.
    """

    heading: str
    layer: str
    repetitions: tuple[tuple[int, int], ...]
    shown: int
    stretches: tuple[tuple[int, int], ...]

    @property
    def start(self) -> int:
        """The first shown column."""
        return self.repetitions[self.shown][0]

    @property
    def stop(self) -> int:
        """The column behind the last shown one."""
        return self.repetitions[self.shown][1]


class Columns(NamedTuple):
    """All columns of a plan, where steps stand, and what is drawn of them.

    Attributes:
        columns: in forward order.
        forward, backward: steps of each pass, in forward order.
        sections: in order; each column belongs to one repetition of one section.
        of_ops: the column of each basic operation.
    """

    columns: tuple[Column, ...]
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    sections: tuple[Section, ...]
    of_ops: tuple[int, ...]

    def shown(self, column: int) -> tuple[int, int, int]:
        """The column that stands for ``column``, its section, and which repetition this is of."""
        for n, section in enumerate(self.sections):
            for r, (start, stop) in enumerate(section.repetitions):
                if start <= column < stop:
                    return section.stop - (stop - column), n, r
        raise IndexError(column)


def columns(view: PlanView) -> Columns:
    """The columns of a plan."""
    plan = view.plan
    found: list[Column] = []
    of_ops = [0] * len(plan.basic_ops)
    modules: list[int] = []
    for step in plan.forward:
        if not step.indices:
            modules.append(len(found))
            found.append(Column(None, type(step.op).__name__, step.path))
        for i in step.indices:
            of_ops[i] = len(found)
            found.append(Column(i, view.kinds[i], view.names[i]))
    forward = _spans(plan.forward, of_ops, modules)
    backward = _spans(plan.backward, of_ops, modules)
    crossed = {c for span in backward for c in range(span.start + 1, span.stop)}
    starts = [span.start for span in forward if span.start not in crossed]
    stretches = list(zip(starts, [*starts[1:], len(found)]))
    sections = _sections(view, found, stretches, (forward, backward))
    return Columns(tuple(found), forward, backward, sections, tuple(of_ops))


def _spans(
    steps: Sequence[Step], of_ops: Sequence[int], modules: Sequence[int]
) -> tuple[Span, ...]:
    left = iter(modules)
    out = []
    for step in steps:
        start = of_ops[step.indices[0]] if step.indices else next(left)
        out.append(Span(start, start + max(1, len(step.indices)), step))
    return tuple(out)


def _sections(
    view: PlanView,
    found: Sequence[Column],
    stretches: Sequence[tuple[int, int]],
    passes: tuple[tuple[Span, ...], tuple[Span, ...]],
) -> tuple[Section, ...]:
    rows = []
    for start, stop in stretches:
        # Measured from the end: at its beginning a first layer may lack operations.
        kind = tuple(
            tuple(
                (
                    type(s.step.op), s.step.fusion, like(s.step.path), stop - s.stop,
                    0 if s.start == start else stop - s.start,
                )
                for s in spans
                if start <= s.start < stop
            )
            for spans in passes
        )  # fmt: skip
        ops = [c.op for c in found[start:stop] if c.op is not None]
        rows.append(view.row(kind, ops, found[stop - 1].name))
    sections = []
    for entry in repeated(rows):
        for part in [entry] if entry.saved > 1 else entry.steps():
            borders = [stretches[n][0] for n in range(part.start, part.stop, part.period)]
            borders.append(stretches[part.stop - 1][1])
            repetitions = tuple(pairwise(borders))
            sizes = [stop - start for start, stop in repetitions]
            shown = sizes.index(max(sizes))
            first = part.start + shown * part.period
            inside = tuple(stretches[first : first + part.period])
            heading, layer = _heading(found, repetitions, shown) if part.times > 1 else ("", "")
            sections.append(Section(heading, layer, repetitions, shown, inside))
    return tuple(sections)


def _heading(
    found: Sequence[Column], repetitions: Sequence[tuple[int, int]], shown: int
) -> tuple[str, str]:
    """What is repeated and how often, and the layer that is shown."""
    times = f"{len(repetitions)} times"
    for behind in range(1, repetitions[0][1] - repetitions[0][0] + 1):
        names = [found[stop - behind].name for _, stop in repetitions]
        parts = varying(joined_parts(names))
        if parts:
            layer = ".".join(names[shown].split(".")[: len(parts)])
            return f"{'.'.join(map(str, parts))}, {times}; drawn: {layer}", layer
    return times, ""

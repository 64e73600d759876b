"""What the picture of a plan shows, and where: a column per operation, equal layers once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..engine.plan import Step
from ..explain.folding import joined_parts, like, repeated, varying
from ..explain.plan_view import PlanView
from .shapes import CHARACTER, KIND, SMALL

MARGIN = 96  # pixels for the names of the rows
_LINE = 1180  # behind which columns go on in another line
_GAP, _NEAR = 30, 12  # between steps, and inside of one
_IN_A_LINE = 13  # characters of the name of a class


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

    def __str__(self) -> str:
        return f"{self.name} {self.kind}".strip()


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


class Line(NamedTuple):
    """Shown columns side by side.

    Attributes:
        columns: in order.
        x: the left edge of each.
        right: the right edge of the last.
    """

    columns: tuple[int, ...]
    x: dict[int, float]
    right: float


class Layout:
    """The columns of a plan, their sizes, and where steps stand.

    Attributes:
        columns: in forward order.
        of_ops: the column of each basic operation.
        passes: the steps of forward and of backward, both in forward order.
        steps: of each pass, the step that covers a column.
        sections: in order; each column belongs to one repetition of one section.
        texts: of each column the name of its class, in lines.
        names: of each column its name; inside of repeated layers without that of the layer.
        height: of all boxes.
        widths: of the box of each column.
    """

    def __init__(self, view: PlanView) -> None:
        plan, found = view.plan, list[Column]()
        self.columns = found
        self.of_ops = [0] * len(plan.basic_ops)
        modules: list[int] = []
        for step in plan.forward:
            if not step.indices:
                modules.append(len(found))
                found.append(Column(None, type(step.op).__name__, step.path))
            for i in step.indices:
                self.of_ops[i] = len(found)
                found.append(Column(i, view.kinds[i], view.names[i]))
        self.passes = self._spans(plan.forward, modules), self._spans(plan.backward, modules)
        self.steps = [
            {c: span for span in spans for c in range(span.start, span.stop)}
            for spans in self.passes
        ]
        self.sections = self._sections(view)
        self.texts = [_lines_of(column.kind) for column in found]
        self.names = [self._name(c) for c in range(len(found))]
        self.height = 34 + 13 * max(map(len, self.texts), default=1)
        self.widths = self._widths()

    def _spans(self, steps: Sequence[Step], modules: Sequence[int]) -> list[Span]:
        left = iter(modules)
        starts = [self.of_ops[s.indices[0]] if s.indices else next(left) for s in steps]
        return [Span(at, at + max(1, len(s.indices)), s) for at, s in zip(starts, steps)]

    def _sections(self, view: PlanView) -> list[Section]:
        crossed = {c for span in self.passes[1] for c in range(span.start + 1, span.stop)}
        starts = [span.start for span in self.passes[0] if span.start not in crossed]
        stretches = list(pairwise([*starts, len(self.columns)]))
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
                for spans in self.passes
            )  # fmt: skip
            ops = [c.op for c in self.columns[start:stop] if c.op is not None]
            rows.append(view.row(kind, ops, self.columns[stop - 1].name))
        sections = []
        for part in repeated(rows):
            borders = [stretches[n][0] for n in range(part.start, part.stop, part.period)]
            repetitions = tuple(pairwise([*borders, stretches[part.stop - 1][1]]))
            sizes = [stop - start for start, stop in repetitions]
            shown = sizes.index(max(sizes))
            first = part.start + shown * part.period
            inside = tuple(stretches[first : first + part.period])
            told = self._heading(repetitions, shown) if part.times > 1 else ("", "")
            sections.append(Section(*told, repetitions, shown, inside))
        return sections

    def _heading(self, repetitions: Sequence[tuple[int, int]], shown: int) -> tuple[str, str]:
        """What is repeated and how often, and the layer that is shown."""
        times = f"{len(repetitions)} times"
        for behind in range(1, repetitions[0][1] - repetitions[0][0] + 1):
            names = [self.columns[stop - behind].name for _, stop in repetitions]
            parts = varying(joined_parts(names))
            if parts:
                layer = ".".join(names[shown].split(".")[: len(parts)])
                return f"{'.'.join(map(str, parts))}, {times}; drawn: {layer}", layer
        return times, ""

    def shown(self, column: int) -> tuple[int, int, int]:
        """The column that stands for ``column``, its section, and which repetition this is of."""
        return next(
            (section.stop - (stop - column), n, r)
            for n, section in enumerate(self.sections)
            for r, (start, stop) in enumerate(section.repetitions)
            if start <= column < stop
        )

    def _name(self, c: int) -> str:
        """The name of a column; that of the layer is above its section."""
        layer = self.sections[self.shown(c)[1]].layer
        name = self.columns[c].name
        return name.removeprefix(f"{layer}.") if layer else name

    def _widths(self) -> list[float]:
        widths = [
            CHARACTER * max(KIND * max(map(len, texts)), SMALL * min(len(name), 12)) + 14
            for texts, name in zip(self.texts, self.names)
        ]
        widths = [max(60.0, width) for width in widths]
        for spans in self.passes:
            for span in spans:
                text = span.step.title
                room = min(len(text), 40) * SMALL * CHARACTER + 14
                _widen(widths, span.start, span.stop, room if text else 0)
        for section in self.sections:
            room = min(len(section.heading), 80) * KIND * CHARACTER + 20
            _widen(widths, section.start, section.stop, room if section.heading else 0)
        return widths

    def _gap(self, before: int, behind: int) -> float:
        same = [steps.get(before) is steps.get(behind) for steps in self.steps]
        return _NEAR if all(same) else _GAP

    def lines(self) -> list[Line]:
        """Columns in lines; a step is in one line, and where it can be, a section is."""
        lines: list[Line] = []
        shown: list[int] = []
        x: dict[int, float] = {}
        right = float(MARGIN)

        def extend(start: int, stop: int) -> Iterator[tuple[int, float, float]]:
            edge = right
            for c in range(start, stop):
                gap = self._gap(shown[-1] if c == start else c - 1, c) if shown or c > start else 0
                yield c, edge + gap, edge + gap + self.widths[c]
                edge += gap + self.widths[c]

        for section in self.sections:
            (*_, (_, _, end)) = extend(section.start, section.stop)
            fits = end - right <= _LINE - MARGIN
            for n, (start, stop) in enumerate(section.stretches):
                (*_, (_, _, end_of_stretch)) = extend(start, stop)
                if shown and (end_of_stretch > _LINE or (n == 0 and fits and end > _LINE)):
                    lines.append(Line(tuple(shown), x, right))
                    shown, x, right = [], {}, float(MARGIN)
                for c, left, edge in list(extend(start, stop)):
                    shown.append(c)
                    x[c], right = left, edge
        return [*lines, Line(tuple(shown), x, right)]


def _widen(widths: list[float], start: int, stop: int, room: float) -> None:
    lacking = room - sum(widths[start:stop]) - _NEAR * (stop - start - 1)
    for c in range(start, stop):
        widths[c] += max(0.0, lacking) / (stop - start)


def _lines_of(kind: str) -> list[str]:
    """The name of a class in at most three lines of a box, broken where its words begin."""
    words = re.findall(r"_*(?:[A-Z]+(?![a-z])|[A-Z]?[^A-Z_]+|_+$)", kind) or [kind]
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > _IN_A_LINE and lines[-1]:
            lines.append("")
        lines[-1] += word
    lines = [line[n : n + 18] for line in lines for n in range(0, len(line), 18)]
    return lines if len(lines) <= 3 else [*lines[:2], lines[2][:_IN_A_LINE] + "…"]

"""Where the columns of a picture stand, in pixels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .columns import Columns, Span
from .shapes import CHARACTER, KIND, SMALL

__all__ = ["MARGIN", "Layout", "Line"]

MARGIN = 96  # for the names of the rows
_LINE = 1180  # behind which columns go on in another line
_GAP, _NEAR = 30, 12  # between steps, and inside of one
_IN_A_LINE = 13  # characters of the name of a class


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
    """The sizes of the columns of a plan.

    Attributes:
        found: the columns.
        texts: of each column the name of its class, in lines.
        names: of each column its name; inside of repeated layers without that of the layer.
        height: of all boxes.
        widths: of the box of each column.
        steps: of each pass, the step that covers a column.
    """

    def __init__(self, found: Columns) -> None:
        self.found = found
        self.texts = [_lines_of(column.kind) for column in found.columns]
        self.names = [self._name(c) for c in range(len(self.texts))]
        self.height = 34 + 13 * max(map(len, self.texts), default=1)
        self.widths = self._widths()
        self.steps: list[dict[int, Span]] = [
            {c: span for span in spans for c in range(span.start, span.stop)}
            for spans in (found.forward, found.backward)
        ]

    def _name(self, c: int) -> str:
        """The name of a column; that of the layer is above its section."""
        layer = self.found.sections[self.found.shown(c)[1]].layer
        name = self.found.columns[c].name
        return name.removeprefix(f"{layer}.") if layer else name

    def _widths(self) -> list[float]:
        widths = [
            CHARACTER * max(KIND * max(map(len, texts)), SMALL * min(len(name), 12)) + 14
            for texts, name in zip(self.texts, self.names)
        ]
        widths = [max(60.0, width) for width in widths]
        for spans in (self.found.forward, self.found.backward):
            for span in spans:
                text = span.step.title
                room = min(len(text), 40) * SMALL * CHARACTER + 14
                _widen(widths, span.start, span.stop, room if text else 0)
        for section in self.found.sections:
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

        for section in self.found.sections:
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

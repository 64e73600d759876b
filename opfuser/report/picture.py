"""A plan as a picture: forward above, from left to right; backward below, from right to left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from ..engine.plan import Plan
from ..errors import counted
from ..explain.plan_view import PlanView
from .layout import MARGIN, Layout, Line, Section
from .shapes import CHARACTER, KIND, SMALL, STYLE, arrow, cut, head, path, rect, text, titled
from .sizes import in_bytes

if TYPE_CHECKING:  # at run time it would import what counts kernels
    from .traffic import Totals, Traffic

# Pixels.
_PAD, _STRIP = 6, 15  # between a box and its frame, and below the boxes, for the frame's name
_SAVED = 46  # between the passes
_LEVEL = 12  # between arcs
_HEADING = 22
_NARROWEST = 460  # a picture of one box


def picture(plan: Plan, traffic: Traffic | None = None, totals: Totals | None = None) -> str:
    """The plan as SVG, for light and dark surroundings.

    A box is a basic operation, a dashed one a plain module; a frame is a step that a fusion built,
    or that covers several operations. Vertical arrows are what forward saves for backward; arcs are
    channels, from the operation that writes one to those that read it. Layers that are equal are
    drawn once. Tooltips tell names, kernels and exact bytes.

    Args:
        plan: any.
        traffic: what its steps save, as :mod:`opfuser.report.traffic` counts it. Without it arrows
            have no bytes, and stand where operations declare that they save something; of a fusion
            with a backward of its own they stand at its last operation.
        totals: launches and bytes that stand below the picture, if any.
    """
    return _Picture(plan, traffic, totals).svg()


def card(plan: Plan) -> str:
    """The picture and, folded away, the text of a plan, as a part of an HTML page."""
    return (
        f'<div style="overflow-x:auto">{picture(plan)}</div>'
        f"<details><summary>Plan as text</summary><pre>{escape(str(plan))}</pre></details>"
    )


class _Arc(NamedTuple):
    """A channel between shown columns.

    Attributes:
        start, stop: columns between which it is drawn.
        leaves, arrives: whether it begins and ends there, or beyond.
        name: of the channel.
        title: its tooltip.
    """

    start: int
    stop: int
    leaves: bool
    arrives: bool
    name: str
    title: str


class _Rows(NamedTuple):
    """Heights in a line: the boxes of both passes, below frames of forward, and below all."""

    forward: float
    between: float
    backward: float
    bottom: float


class _Picture:
    def __init__(self, plan: Plan, traffic: Traffic | None, totals: Totals | None) -> None:
        self.plan = plan
        self.view = PlanView(plan)
        self.totals = totals
        self.layout = Layout(self.view)
        at = self.layout.of_ops
        saved = dict.fromkeys(self.view.saving) if traffic is None else traffic.saved
        self.saved = {at[i]: size for i, size in saved.items()} if plan.backward else {}
        self.codes = {(e.stage, at[e.source], at[e.target]): str(e) for e in plan.edges}
        self.arcs = _levels(self._arcs())
        self.parts: list[str] = []

    def svg(self) -> str:
        y, width = 8.0, float(MARGIN)
        for line in self.layout.lines():
            y = self._line(line, y) + 18
            width = max(width, line.right + 34)
        y = self._counted(self._legend(y), max(width, _NARROWEST))
        plan = self.plan
        about = (
            f"Plan of {counted(len(plan.basic_ops), 'basic operation')}: "
            f"{counted(len(plan.forward), 'forward step')}, "
            f"{counted(len(plan.backward), 'backward step')}"
        )
        w, h = f"{max(width, _NARROWEST):.0f}", f"{y:.0f}"
        opening = (
            '<svg xmlns="http://www.w3.org/2000/svg" class="opfuser-plan" role="img" '
            f'width="{w}" height="{h}" viewBox="0 0 {w} {h}" aria-label="{about}">'
        )
        paper = f'<rect class="paper" width="{w}" height="{h}" rx="8"/>'
        return "\n".join([opening, f"<style>{STYLE}</style>", paper, *self.parts, "</svg>"])

    def _arcs(self) -> Iterator[_Arc]:
        layout = self.layout
        for name, *ends in self.view.channels:
            (start, n, r), (stop, m, q) = (layout.shown(layout.of_ops[i]) for i in ends)
            shown = layout.columns[start], layout.columns[stop]
            title = f"channel {name}".strip() + ", "
            title += " to ".join(f"op {column.op} {column.kind}" for column in shown)
            if n == m and r != q:
                section = layout.sections[n]
                title += " of the next repetition"
                yield _Arc(start, section.stop - 1, True, False, name, title)
                yield _Arc(section.start, stop, False, True, name, title)
            else:
                yield _Arc(start, stop, True, True, name, title)

    def _line(self, line: Line, top: float) -> float:
        """Draws a line, and returns where it ends."""
        inside = set(line.columns)
        sections = [
            s
            for s in self.layout.sections
            if s.heading and not inside.isdisjoint(range(s.start, s.stop))
        ]
        arcs = [
            (arc, level)
            for arc, level in self.arcs.items()
            if arc.start <= line.columns[-1] and arc.stop >= line.columns[0]
        ]
        levels = 1 + max((level for _, level in arcs), default=0)
        forward = top + (_HEADING if sections else 0) + 16 + _LEVEL * levels
        framed = self.layout.height + _STRIP + _PAD
        between = forward + framed
        backward = between + _SAVED if self.plan.backward else forward
        y = _Rows(forward, between, backward, backward + framed)
        for section in sections:
            self._section(section, line, top, y.bottom + 4)
        self._pass(0, line, y.forward)
        if self.plan.backward:
            self._row_name("saved", (y.between + y.backward) / 2)
            for c in line.columns:
                self._saved_arrow(c, line, y)
            self._pass(1, line, y.backward)
        for arc, level in arcs:
            self._arc(arc, line, y.forward, y.forward - 20 - _LEVEL * level)
        self._open_ends(line, y.forward)
        return y.bottom + 8

    def _row_name(self, name: str, y: float) -> None:
        self.parts.append(text(10, y + 4, name, "row"))

    def _section(self, section: Section, line: Line, top: float, bottom: float) -> None:
        own = [c for c in line.columns if section.start <= c < section.stop]
        left, right = line.x[own[0]] - 11, self._right(line, own[-1]) + 11
        starts = own[0] == section.start
        heading = section.heading if starts else f"{section.heading}, continued"
        heading = cut(heading, right - left - 12, KIND)
        shapes = rect("section", left, top, right - left, bottom - top, 10)
        shapes += text(left + 9, top + 16, heading, "heading")
        first, last = section.repetitions[0]
        lacks = section.stop - section.start - (last - first)
        if lacks:
            missing = self.layout.columns[section.start : section.start + lacks]
            names = ", ".join(map(str, missing))
            shapes = titled(shapes, f"The first of them has nothing in the place of {names}")
        self.parts.append(shapes)

    def _right(self, line: Line, c: int) -> float:
        return line.x[c] + self.layout.widths[c]

    # A pass: 0 is forward, 1 is backward.

    def _pass(self, n: int, line: Line, y: float) -> None:
        self._row_name(("forward", "backward")[n], y + self.layout.height / 2)
        for span in self.layout.passes[n]:
            name = span.step.title
            if not name or span.start not in line.x:
                continue
            left, right = line.x[span.start] - _PAD, self._right(line, span.stop - 1) + _PAD
            height = self.layout.height + _STRIP + _PAD
            frame = rect("frame", left, y - _PAD, right - left, height + _PAD, 7)
            frame += text(left + 7, y + height - 7, cut(name, right - left - 8, SMALL), "fusion")
            told = ", ".join(self.view.kernels(span.step))
            self.parts.append(titled(frame, f"{name}: {told}" if told else name))
        self._flow(n, line, y + self.layout.height / 2)
        for c in line.columns:
            if c in self.layout.steps[n]:
                self._box(n, c, line.x[c], y)

    def _framed(self, n: int, c: int) -> bool:
        span = self.layout.steps[n].get(c)
        return span is not None and bool(span.step.title)

    def _box(self, n: int, c: int, x: float, y: float) -> None:
        column, width, height = self.layout.columns[c], self.layout.widths[c], self.layout.height
        idle = " idle" if n == 1 and not self._runs(c) else ""
        shape = "module" if column.op is None else "op"
        parts = [rect(shape + idle, x, y, width, height, 5)]
        if column.op is not None:
            parts.append(text(x + 6, y + 12, str(column.op), "small"))
        for k, part in enumerate(self.layout.texts[c]):
            parts.append(text(x + 7, y + 25 + 13 * k, part, f"kind{idle}"))
        if self.layout.names[c]:
            name = cut(self.layout.names[c], width - 10, SMALL)
            parts.append(text(x + 6, y + height - 6, name, "small"))
        self.parts.append(titled("".join(parts), self._about(n, c)))

    def _about(self, n: int, c: int) -> str:
        column = self.layout.columns[c]
        told = [str(column)]
        if column.op is None:
            told.append("a plain module")
        elif column.op in self.view.notes:
            told.append(self.view.notes[column.op])
        if n == 1 and not self._runs(c):
            told.append("no gradient is needed")
        elif not self._framed(n, c):
            told += self.view.kernels(self.layout.steps[n][c].step)
        return ", ".join(told)

    def _flow(self, n: int, line: Line, y: float) -> None:
        """Arrows between neighbors, from the left edge of the line to its right one."""
        first, last = line.columns[0], line.columns[-1]
        steps = self.layout.steps[n]
        ends: list[int | None] = [None, *line.columns, None]
        for a, b in pairwise(ends):
            if n == 1 and not self._hands_on(a, b):
                continue
            left = line.x[first] - 20 if a is None else self._right(line, a)
            right = self._right(line, last) + 20 if b is None else line.x[b]
            kind, title = "flow", ""
            codes = ("forward", a, b) if n == 0 else ("backward", b, a)
            if codes in self.codes:
                kind, title = "flow codes", self.codes[codes]
            start, stop = (left, right) if n == 0 else (right, left)
            within = a is not None and b is not None and steps[a] is steps[b]
            self.parts.append(arrow(kind, (start, y), (stop, y), title, pointed=not within))

    def _runs(self, c: int) -> bool:
        """Whether backward does anything in a column."""
        if c not in self.layout.steps[1]:
            return False
        op = self.layout.columns[c].op
        return op is None or self.plan.needs[op] is not None

    def _hands_on(self, c: int | None, behind: int | None) -> bool:
        """Whether backward hands a gradient from the column ``behind`` to ``c``."""
        if c is not None and not self._runs(c):
            return False
        if behind is None:
            return True
        op = self.layout.columns[behind].op
        needs = None if op is None else self.plan.needs[op]
        return self._runs(behind) and (op is None or (needs is not None and needs.input))

    # Between operations.

    def _saved_arrow(self, c: int, line: Line, y: _Rows) -> None:
        if c not in self.saved:
            return
        column, size = self.layout.columns[c], self.saved[c]
        top = y.between if self._framed(0, c) else y.forward + self.layout.height
        bottom = y.backward - (_PAD if self._framed(1, c) else 0)
        title = f"{column} saves "
        title += "something for backward" if size is None else f"{size:,} bytes for backward"
        title = "; ".join(filter(None, (title, self.codes.get(("joint", c, c)))))
        x = line.x[c] + 14
        self.parts.append(arrow("saved", (x, top), (x, bottom), title))
        if size is not None:
            at = (y.between + y.backward) / 2
            self.parts.append(text(x + 7, at, in_bytes(size), "bytes"))

    def _arc(self, arc: _Arc, line: Line, y: float, level: float) -> None:
        left, right = line.x[line.columns[0]] - 22, line.right + 22
        leaves, arrives = arc.leaves and arc.start in line.x, arc.arrives and arc.stop in line.x
        if arc.start in line.x:
            middle = line.x[arc.start] + self.layout.widths[arc.start] / 2
            left = middle + 7 if leaves else line.x[arc.start] - 22
        if arc.stop in line.x:
            middle = line.x[arc.stop] + self.layout.widths[arc.stop] / 2
            right = middle - 7 if arrives else self._right(line, arc.stop) + 22
        d = f"M{left:.1f} {level:.1f}"
        if leaves:
            d = f"M{left:.1f} {y:.1f}V{level + 6:.1f}q0 -6 6 -6"
        d += f"H{right - 6:.1f}q6 0 6 6V{y - 6:.1f}" if arrives else f"H{right:.1f}"
        shape = path("channel", d)
        if arrives:
            shape += head("channel-head", right, y, 0, 1)
        if arc.name and leaves:
            name = cut(arc.name, right - left - 10, SMALL)
            shape += text(left + 6, level - 3, name, "channel-name")
        self.parts.append(titled(shape, arc.title))

    def _open_ends(self, line: Line, y: float) -> None:
        """Extra inputs that the caller passes, and extra outputs that it gets."""
        for c in line.columns:
            i = self.layout.columns[c].op
            if i is None:
                continue
            op = self.plan.basic_ops[i]
            for s, channel in enumerate(op._extra_input_channels):
                if channel is None:
                    x = line.x[c] + 12 + 9 * s
                    title = f"extra input {s} of op {i}, from the caller"
                    self.parts.append(arrow("caller", (x, y - 16), (x, y), title))
            for s, public in enumerate(op._extra_output_to_caller):
                if public:
                    x = self._right(line, c) - 12 - 9 * s
                    title = f"extra output {s} of op {i}, to the caller"
                    self.parts.append(arrow("caller", (x, y), (x, y - 16), title))

    def _legend(self, y: float) -> float:
        """Draws what occurs in the picture, with its meaning, and returns where it ends."""
        plan, ops = self.plan, self.plan.basic_ops
        callers = any(
            None in op._extra_input_channels or any(op._extra_output_to_caller) for op in ops
        )
        modules = any(column.op is None for column in self.layout.columns)
        framed = any(step.title for step in (*plan.forward, *plan.backward))
        down = (11.0, -10.0), (11.0, 3.0)
        entries = [
            (framed, rect("frame", 0, -9, 22, 12, 3), "one step"),
            (self.saved, arrow("saved", *down), "saved for backward"),
            (self.arcs, path("channel", "M2 3V-3q0 -6 6 -6H14q6 0 6 6V3"), "channel"),
            (callers, arrow("caller", *down), "of the caller"),
            (plan.edges, path("flow codes", "M1 -3H21"), "as codes"),
            (self.view.idle, rect("op idle", 0, -9, 22, 12, 3), "no gradient"),
            (modules, rect("module", 0, -9, 22, 12, 3), "plain module"),
        ]
        x = 12.0
        for occurs, shape, meaning in entries:
            if occurs:
                self.parts.append(f'<g transform="translate({x:.0f} {y + 8:.0f})">{shape}</g>')
                self.parts.append(text(x + 28, y + 11, meaning, "legend"))
                x += 28 + len(meaning) * SMALL * CHARACTER + 20
        return y + 22

    def _counted(self, y: float, width: float) -> float:
        """Writes launches and bytes, and returns where they end."""
        if self.totals is None:
            return y
        figures = ", ".join(map(" ".join, self.totals.figures))
        told = [f"On a GPU, a call and its backward: {figures}", self.totals.outside]
        for line in told:
            for part in wrap(line, int((width - 24) / (SMALL * CHARACTER))):
                self.parts.append(text(12, y + 8, part, "legend"))
                y += 14
        return y + 4


def _levels(arcs: Iterable[_Arc]) -> dict[_Arc, int]:
    """The height of each arc, so that none lies on another; short ones are low."""
    levels: dict[_Arc, int] = {}
    for arc in sorted(set(arcs), key=lambda a: (a.stop - a.start, a)):
        taken = {
            level
            for other, level in levels.items()
            if other.start <= arc.stop and arc.start <= other.stop
        }
        levels[arc] = next(n for n in range(len(taken) + 1) if n not in taken)
    return levels

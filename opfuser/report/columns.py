"""What the picture of a plan shows: a column per operation, equal layers once, and channels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..engine.folding import Row, joined_parts, layer_of, like, op_numbers, repeated
from ..engine.plan import Plan, Step
from ..engine.plan_text import varying
from ..engine.routing import PrivateChannel

__all__ = ["Channel", "Column", "Columns", "Section", "Span", "channels", "columns"]


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


class Channel(NamedTuple):
    """An extra output that an operation hands to a later one.

    Attributes:
        name: of the channel; empty if only one Sequential sees it.
        source, target: the basic operations, by index.
    """

    name: str
    source: int
    target: int


def columns(plan: Plan) -> Columns:
    """The columns of a plan."""
    names = plan.names or ("",) * len(plan.basic_ops)
    found: list[Column] = []
    of_ops = [0] * len(plan.basic_ops)
    modules: list[int] = []
    for step in plan.forward:
        if not step.indices:
            modules.append(len(found))
            found.append(Column(None, type(step.op).__name__, step.path))
        for i in step.indices:
            of_ops[i] = len(found)
            found.append(Column(i, type(plan.basic_ops[i]).__name__, names[i]))
    forward = _spans(plan.forward, of_ops, modules)
    backward = _spans(plan.backward, of_ops, modules)
    crossed = {c for span in backward for c in range(span.start + 1, span.stop)}
    starts = [span.start for span in forward if span.start not in crossed]
    stretches = list(zip(starts, [*starts[1:], len(found)]))
    sections = _sections(plan, found, stretches, (forward, backward))
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
    plan: Plan,
    found: Sequence[Column],
    stretches: Sequence[tuple[int, int]],
    passes: tuple[tuple[Span, ...], tuple[Span, ...]],
) -> tuple[Section, ...]:
    numbers = op_numbers(plan)
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
        ops = tuple(numbers[c.op] for c in found[start:stop] if c.op is not None)
        rows.append(Row(kind, ops, layer_of(found[stop - 1].name)))
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


def channels(plan: Plan) -> tuple[Channel, ...]:
    """The channels between the basic operations of a plan, in the order in which they are read."""
    names = plan.names or ("",) * len(plan.basic_ops)
    sources: dict[tuple[str, str | None], int] = {}
    found = []

    def key(channel: str, i: int) -> tuple[str, str | None]:
        # A private channel is that of the Sequential which holds the operation.
        private = isinstance(channel, PrivateChannel)
        return channel, names[i].rpartition(".")[0] if private else None

    for i, op in enumerate(plan.basic_ops):
        for channel in op._extra_input_channels:
            if channel is not None and key(channel, i) in sources:
                name = "" if isinstance(channel, PrivateChannel) else channel
                found.append(Channel(name, sources[key(channel, i)], i))
        for channel in op._extra_output_channels:
            if channel is not None:
                sources[key(channel, i)] = i
    return tuple(found)

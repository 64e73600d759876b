"""The steps of a plan as rows of text: equal layers once, with names that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..engine.plan import Step, span
from ..sequence.plain_modules import replacement
from .folding import Fold, NamePart, joined_parts, varying
from .plan_view import PlanView, Stage

_Parts = tuple[NamePart, ...]


class StepRow(NamedTuple):
    """A step of a pass, in all repetitions of its layer.

    Attributes:
        place: its operations in the first repetition, by index.
        ops: their names and kinds.
        fusion: its title.
        told: what computes it, and what its operations say about themselves.
        steps: positions of the repetitions in the pass.
    """

    place: str
    ops: str
    fusion: str
    told: str
    steps: tuple[int, ...]

    @property
    def label(self) -> str:
        """All but the place, in one line."""
        fused = f" -> {self.fusion}" if self.fusion else ""
        return f"{self.ops}{fused}{f': {self.told}' if self.told else ''}"


class Layer(NamedTuple):
    """Consecutive steps of a pass, and their repetitions.

    Attributes:
        heading: about all repetitions; empty for a step that is not repeated.
        prefix: the part of names that they share.
        rows: the steps of one repetition, in the order in which they run.
    """

    heading: str
    prefix: str
    rows: list[StepRow]


def layers(
    view: PlanView, stage: Stage, told: Callable[[Step], bool] = lambda _: True
) -> list[Layer]:
    """The steps of a pass in the order in which they run, equal layers together.

    Args:
        view: of the plan.
        stage: whose pass.
        told: whether a step is of interest; a layer has those that are in one repetition.
    """
    steps = view.steps(stage)
    found = [_layer(view, steps, part, told) for part in view.folds(stage)]
    if stage == "backward":
        found = [layer._replace(rows=layer.rows[::-1]) for layer in reversed(found)]
    return [layer for layer in found if layer.rows]


def _layer(
    view: PlanView, steps: Sequence[Step], part: Fold, told: Callable[[Step], bool]
) -> Layer:
    columns = [
        range(first, part.stop, part.period)
        for first in range(part.start, part.start + part.period)
    ]
    columns = [column for column in columns if any(told(steps[n]) for n in column)]
    ops = [_ops(view, [steps[n] for n in column]) for column in columns]
    layer: _Parts = ()
    if part.times > 1:
        layer = next((found for o in reversed(ops) if (found := varying(o[-1].name))), ())
    rows = [_row(view, steps, column, o, layer) for column, o in zip(columns, ops)]
    if part.times == 1:
        return Layer("", "", rows)
    covered = [i for n in range(part.start, part.stop) for i in steps[n].indices]
    heading = f"{part.times} times" + (f", ops {span(covered)}" if covered else "")
    heading = f"{_text(layer)}, {heading}" if layer else heading
    return Layer(heading, _text(layer) or heading, rows)


def _ops(view: PlanView, repetitions: Sequence[Step]) -> list[_Op]:
    """The operations of a step; those that the first repetition lacks stand at the beginning."""
    if not repetitions[0].indices:
        name = joined_parts([step.path for step in repetitions])
        return [_Op(name, type(repetitions[0].op).__name__, True)]
    out: list[_Op] = []
    size, least = len(repetitions[-1].indices), len(repetitions[0].indices)
    for behind in range(size, 0, -1):
        own = [step.indices[-behind] for step in repetitions if len(step.indices) >= behind]
        name = joined_parts([view.names[i] for i in own])
        out.append(_Op(name, view.kinds[own[0]], behind <= least))
    return out


def _row(
    view: PlanView, steps: Sequence[Step], column: Sequence[int], ops: Sequence[_Op], layer: _Parts
) -> StepRow:
    step, at = steps[column[0]], tuple(column)
    local = [op.within(layer) for op in ops]
    if not step.indices:
        label = f"{_text(local[0].name)} {ops[0].kind} (plain module)".strip()
        instead = replacement(step.op)
        told = f"{instead.text} can replace it" if instead else ""
        return StepRow("-", label, "", told, at)
    lead = [op for op in local if not op.always]
    label = " + ".join(_runs(local[len(lead) :]))
    if lead:
        label = f"({' + '.join(_runs(lead))} +) {label}"
    notes = dict.fromkeys(view.notes[i] for i in step.indices if i in view.notes)
    told = ", ".join([*view.kernels(step), *notes])
    return StepRow(span(step.indices), label, step.title, told, at)


# Names in rows.


class _Op(NamedTuple):
    """An operation of a step, in all repetitions.

    Attributes:
        name: joined over them.
        kind: the name of its class.
        always: whether the first repetition has it too, and in the same layer.
    """

    name: _Parts
    kind: str
    always: bool

    def within(self, layer: _Parts) -> _Op:
        """It, with a name that begins behind that of the layer, be it its own or the one before."""
        own, rest = self.name[: len(layer)], self.name[len(layer) :]
        if not layer or not rest:
            return self
        if own == layer:
            return self._replace(name=rest)
        if all(a == b or (a.is_number and b.is_number) for a, b in zip(own, layer)):
            first = rest[0]._replace(text=f"the previous {rest[0].text}")
            return self._replace(name=(first, *rest[1:]), always=False)
        return self


def _text(name: _Parts) -> str:
    return ".".join(map(str, name))


def _runs(ops: Sequence[_Op]) -> Iterator[str]:
    """Operations with their names; neighbours share one: ``mlp.0-2 A + B + C``."""
    runs: list[list[_Op]] = []
    for op in ops:
        if runs and _follows(runs[-1][-1].name, op.name):
            runs[-1].append(op)
        else:
            runs.append([op])
    for run in runs:
        last = f"-{run[-1].name[-1]}" if run[-1].name != run[0].name else ""
        yield f"{_text(run[0].name)}{last} {' + '.join(op.kind for op in run)}".strip()


def _follows(name: _Parts, other: _Parts) -> bool:
    """Whether ``other`` is the same name, or that with the next number at its end."""
    if name == other or name[:-1] != other[:-1]:
        return name == other
    last, next_ = name[-1].text, other[-1].text
    return last.isdecimal() and next_.isdecimal() and int(next_) == int(last) + 1

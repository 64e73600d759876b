"""What there is to say about a plan, as data: text, log, JSON, pages and pictures render it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import nn

from ..op import FusedOperation, FusibleOperation
from ..op.kinds import is_built_in
from ..quantization.quantizers import multiplies
from .folding import Fold, NamePart, Row, joined_parts, layer_of, like, repeated, varying
from .plain_modules import replacement
from .plan import Plan, Step, span, together
from .routing import PrivateChannel

__all__ = ["Channel", "Layer", "PlanView", "StepRow"]

Stage = Literal["forward", "backward"]
_TRITON = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
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


class Channel(NamedTuple):
    """An extra output that an operation hands to a later one.

    Attributes:
        name: of the channel; empty if only one Sequential sees it.
        source, target: the basic operations, by index.
    """

    name: str
    source: int
    target: int


class PlanView:
    """A plan, and what follows from it; nothing is computed before it is asked for.

    Attributes:
        plan: any.
        names: of its basic operations; empty ones outside of a Sequential.
        kinds: the names of their classes.
        call: what the plan is for.
    """

    def __init__(self, plan: Plan) -> None:
        env = plan.env
        grad = "on" if env.grad_enabled else "off"
        self.plan = plan
        self.names = plan.names or ("",) * len(plan.basic_ops)
        self.kinds = [type(op).__name__ for op in plan.basic_ops]
        self.call = (
            f"{env.dtype}, {env.device}, autocast {env.autocast_dtype or 'off'}, grad {grad}"
        )
        self._notes = dict(plan.notes)
        self._on_gpu = env.device.type in ("cuda", "meta")

    def named(self, at: int) -> str:
        """An operation by name and kind: ``layers.3.norm RMSNorm``."""
        return f"{self.names[at]} {self.kinds[at]}".strip()

    # Steps.

    def steps(self, stage: str) -> tuple[Step, ...]:
        """The steps of the pass of a stage; of a joint one those of forward."""
        return self.plan.backward if stage == "backward" else self.plan.forward

    def runs_backward(self, step: Step) -> bool:
        """Whether a step of backward computes anything."""
        return not step.indices or any(self.plan.needs[i] is not None for i in step.indices)

    @property
    def idle(self) -> list[int]:
        """The operations of steps of backward that compute nothing."""
        return [i for s in self.plan.backward if not self.runs_backward(s) for i in s.indices]

    @cached_property
    def numbers(self) -> list[int]:
        """A number for each operation, the same for those that equal layers have in one place."""
        plan, numbers = self.plan, dict[tuple[object, ...], int]()

        def number(*what: object) -> int:
            return numbers.setdefault(what, len(numbers))

        gemms = together((choice.op, choice._replace(op=0)) for choice in plan.gemms)
        quantized = set(plan.quantized)
        return [
            number(
                type(op), like(name), self._notes.get(i), *gemms.get(i, ()), i in quantized,
                plan.needs[i] is None,
                # Kernels are not there for all.
                *(p.dtype for p in op._parameters.values() if p is not None),
            )
            for i, (op, name) in enumerate(zip(plan.basic_ops, self.names))
        ]  # fmt: skip

    def row(self, kind: Hashable, ops: Sequence[int], last: str) -> Row:
        """What a stretch of operations is compared by; ``last`` is the name it ends with."""
        return Row(kind, tuple(self.numbers[i] for i in ops), layer_of(last))

    def folds(self, stage: Stage) -> tuple[Fold, ...]:
        """The steps of a pass, in forward order, with equal layers as one entry.

        Every step belongs to exactly one entry. Of the repetitions that begin at a step the longest
        stretch is taken, and of equally long ones that of the shortest period. Repetitions begin
        where a layer does: what names have in common down to their first number.
        """
        return repeated(
            [
                self.row(
                    (type(step.op), step.fusion, like(step.path)),
                    step.indices,
                    self.names[step.indices[-1]] if step.indices else step.path,
                )
                for step in self.steps(stage)
            ]
        )

    def layers(self, stage: Stage, told: Callable[[Step], bool] = lambda _: True) -> list[Layer]:
        """The steps of a pass in the order in which they run, equal layers together.

        Args:
            stage: whose pass.
            told: whether a step is of interest; a layer has those that are in one repetition.
        """
        steps = self.steps(stage)
        parts = [
            part
            for found in self.folds(stage)
            for part in ([found] if found.saved > 1 else found.steps())
        ]
        layers = [self._layer(steps, part, told) for part in parts]
        if stage == "backward":
            layers = [layer._replace(rows=layer.rows[::-1]) for layer in reversed(layers)]
        return [layer for layer in layers if layer.rows]

    def _layer(self, steps: Sequence[Step], part: Fold, told: Callable[[Step], bool]) -> Layer:
        columns = [
            range(first, part.stop, part.period)
            for first in range(part.start, part.start + part.period)
        ]
        columns = [column for column in columns if any(told(steps[n]) for n in column)]
        ops = [self._ops([steps[n] for n in column]) for column in columns]
        layer: _Parts = ()
        if part.times > 1:
            layer = next((found for o in reversed(ops) if (found := varying(o[-1].name))), ())
        rows = [self._row(steps, column, o, layer) for column, o in zip(columns, ops)]
        if part.times == 1:
            return Layer("", "", rows)
        covered = [i for n in range(part.start, part.stop) for i in steps[n].indices]
        heading = f"{part.times} times" + (f", ops {span(covered)}" if covered else "")
        heading = f"{_text(layer)}, {heading}" if layer else heading
        return Layer(heading, _text(layer) or heading, rows)

    def _ops(self, repetitions: Sequence[Step]) -> list[_Op]:
        """The operations of a step; those behind the last one of all repetitions together."""
        if not repetitions[0].indices:
            name = joined_parts([step.path for step in repetitions])
            return [_Op(name, type(repetitions[0].op).__name__, True)]
        out: list[_Op] = []
        size, least = len(repetitions[-1].indices), len(repetitions[0].indices)
        for behind in range(size, 0, -1):
            own = [step.indices[-behind] for step in repetitions if len(step.indices) >= behind]
            name = joined_parts([self.names[i] for i in own])
            out.append(_Op(name, self.kinds[own[0]], behind <= least))
        return out

    def _row(
        self, steps: Sequence[Step], column: Sequence[int], ops: Sequence[_Op], layer: _Parts
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
        notes = dict.fromkeys(self._notes[i] for i in step.indices if i in self._notes)
        told = ", ".join([*self.kernels(step), *notes])
        return StepRow(span(step.indices), label, step.title, told, at)

    # What computes a step.

    def kernels(self, step: Step) -> tuple[str, ...]:
        """What computes a step, as its operations declare it: ``("Triton norm", "cuBLAS")``.

        Empty where that is torch, or where an operation of the user does not declare it.
        """
        declared = _declared(step.op)
        if not declared or not is_built_in(step.op):
            return declared
        out: list[str] = []
        for name in declared:
            if name.endswith("GEMM"):
                out += self._gemms(step, "cuBLAS" if name == "GEMM" else name)
            elif not name.startswith("Triton ") or self._has_kernels(step):
                out.append(name)
        return tuple(dict.fromkeys(out))

    def about_kernels(self) -> str:
        """One sentence: whose kernels run, and where they are not those that steps declare."""
        device = self.plan.env.device.type
        steps = [*self.plan.forward, *self.plan.backward]
        lost = {
            name.removeprefix("Triton ")
            for step in steps
            if is_built_in(step.op) and not self._has_kernels(step)
            for name in _declared(step.op)
            if name.startswith("Triton ")
        }
        some = any(map(self.kernels, steps))
        if not some and not lost:
            return ""
        text = "kernels: torch's where none is named" if some else "kernels: torch's"
        if device == "meta":
            text += "; meta is planned as a GPU"
        if lost:
            what = "this dtype" if self._on_gpu else device
            missing = f"has none for {what}" if _TRITON else "is not installed"
            text += f"; Triton {missing}: {', '.join(sorted(lost))}"
        return text

    def _has_kernels(self, step: Step) -> bool:
        dtype = self.plan.env.autocast_dtype or next(
            (
                p.dtype
                for i in step.indices
                for p in self.plan.basic_ops[i]._parameters.values()
                if p is not None and p.is_floating_point() and p.dtype.itemsize > 1
            ),
            self.plan.env.dtype,
        )
        takes = dtype in _DTYPES or not dtype.is_floating_point
        return self._on_gpu and _TRITON and takes

    def _gemms(self, step: Step, unquantized: str) -> list[str]:
        env, indices = self.plan.env, set(step.indices)
        if env.recipe is None or indices.isdisjoint(self.plan.quantized):
            return [unquantized] if self._on_gpu else []
        own = [choice for choice in self.plan.gemms if choice.op in indices]
        chosen = [choice.provider for choice in own if not choice.refusal]
        if chosen and len(chosen) == len(own):
            return chosen
        real = env.device.type == "meta" or multiplies(env.device, env.recipe)
        name = "scaled_mm" if unquantized == "cuBLAS" else f"scaled {unquantized}"
        return [*chosen, name if real else f"emulated {name}"]

    # Between operations.

    @property
    def saving(self) -> list[int]:
        """The operations that declare that they save something for backward.

        Of a fusion with a backward of its own it is the last one: what it saves is its business.
        """
        plan, both = self.plan, {(id(step.op), step.indices) for step in self.plan.backward}
        out = []
        for step in plan.forward:
            own = [i for i in step.indices if plan.needs[i] is not None]
            if len(step.indices) > 1 and (id(step.op), step.indices) in both:
                out += own[-1:]
            else:
                ops = ((i, plan.basic_ops[i]) for i in own)
                out += [i for i, op in ops if op.Saved is not None or not is_built_in(op)]
        return out

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels between the operations, in the order in which they are read."""
        sources: dict[tuple[str, str | None], int] = {}
        found = []

        def key(channel: str, i: int) -> tuple[str, str | None]:
            # A private channel is that of the Sequential which holds the operation.
            private = isinstance(channel, PrivateChannel)
            return channel, self.names[i].rpartition(".")[0] if private else None

        for i, op in enumerate(self.plan.basic_ops):
            for channel in op._extra_input_channels:
                if channel is not None and key(channel, i) in sources:
                    name = "" if isinstance(channel, PrivateChannel) else channel
                    found.append(Channel(name, sources[key(channel, i)], i))
            for channel in op._extra_output_channels:
                if channel is not None:
                    sources[key(channel, i)] = i
        return tuple(found)


def _declared(op: nn.Module) -> tuple[str, ...]:
    """What operations of a step declare; a class of the user must do so itself."""
    if not isinstance(op, FusibleOperation):
        return ()
    own = op.kernels if is_built_in(op) or "kernels" in vars(type(op)) else ()
    if own or not isinstance(op, FusedOperation) or not is_built_in(op):
        return own
    return tuple(dict.fromkeys(name for basic in op.basic_ops for name in _declared(basic)))


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

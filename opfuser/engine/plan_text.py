"""A plan as text for people: equal layers once, at most 80 columns, nothing that varies."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn

from ..errors import counted
from ..op import FusedOperation, FusibleOperation
from ..op.kinds import is_built_in
from ..quantization.quantizers import multiplies
from .folding import Fold, NamePart, fold, joined_numbers, joined_parts
from .plain_modules import replacement
from .plan import Plan, Step
from .reasons import fusion_lines, places, span, wrapped

__all__ = ["FoldText", "StepText", "computed_by", "fold_text", "runs_backward", "text", "varying"]

_Stage = Literal["forward", "backward"]
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_TRITON = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def text(plan: Plan) -> str:
    """The text that ``print(plan)`` shows."""
    env = plan.env
    grad = "on" if env.grad_enabled else "off"
    about = f"{env.dtype}, {env.device}, autocast {env.autocast_dtype or 'off'}, grad {grad}"
    lines = wrapped(f"Plan for {counted(len(plan.basic_ops), 'basic operation')} ({about})")
    lines += _pass_lines(plan, "forward") + _pass_lines(plan, "backward")
    lines += wrapped(_about_kernels(plan))
    lines += _precision_lines(plan)
    for what in dict.fromkeys(plan.assumed):
        lines += wrapped(f"assumed: {what}")
    for replay in plan.replays:
        lines += wrapped(f"replay of {span(replay.indices)}: {replay}")
    return "\n".join([*lines, *fusion_lines(plan)])


# What computes a step.


def computed_by(plan: Plan, step: Step) -> tuple[str, ...]:
    """What computes a step, as far as its operations declare it: ``("Triton norm", "cuBLAS")``.

    Empty where that is torch, or where an operation of the user does not declare it.
    """
    declared = _declared(step.op)
    if not declared or not is_built_in(step.op):
        return declared
    out: list[str] = []
    for name in declared:
        if name.endswith("GEMM"):
            out += _gemms(plan, step, "cuBLAS" if name == "GEMM" else name)
        elif not name.startswith("Triton ") or _has_kernels(plan, step):
            out.append(name)
    return tuple(dict.fromkeys(out))


def _declared(op: nn.Module) -> tuple[str, ...]:
    """What operations of a step declare; a class of the user must do so itself."""
    if not isinstance(op, FusibleOperation):
        return ()
    own = op.kernels if is_built_in(op) or "kernels" in vars(type(op)) else ()
    if own or not isinstance(op, FusedOperation) or not is_built_in(op):
        return own
    return tuple(dict.fromkeys(name for basic in op.basic_ops for name in _declared(basic)))


def _on_gpu(plan: Plan) -> bool:
    return plan.env.device.type in ("cuda", "meta")


def _has_kernels(plan: Plan, step: Step) -> bool:
    dtype = plan.env.autocast_dtype or next(
        (
            p.dtype
            for i in step.indices
            for p in plan.basic_ops[i]._parameters.values()
            if p is not None and p.is_floating_point() and p.dtype.itemsize > 1
        ),
        plan.env.dtype,
    )
    takes = dtype in _DTYPES or not dtype.is_floating_point
    return _on_gpu(plan) and _TRITON and takes


def _gemms(plan: Plan, step: Step, unquantized: str) -> list[str]:
    env, indices = plan.env, set(step.indices)
    if env.recipe is None or indices.isdisjoint(plan.quantized):
        return [unquantized] if _on_gpu(plan) else []
    chosen = [
        choice.provider for choice in plan.gemms if choice.op in indices and not choice.refusal
    ]
    rest = [choice for choice in plan.gemms if choice.op in indices and choice.refusal]
    if chosen and not rest:
        return chosen
    real = env.device.type == "meta" or multiplies(env.device, env.recipe)
    name = "scaled_mm" if unquantized == "cuBLAS" else f"scaled {unquantized}"
    return [*chosen, name if real else f"emulated {name}"]


def _about_kernels(plan: Plan) -> str:
    """One sentence: whose kernels these are, and where they are not those that steps declare."""
    steps = [*plan.forward, *plan.backward]
    lost = {
        name.removeprefix("Triton ")
        for step in steps
        if is_built_in(step.op) and not _has_kernels(plan, step)
        for name in _declared(step.op)
        if name.startswith("Triton ")
    }
    some = any(computed_by(plan, step) for step in steps)
    if not some and not lost:
        return ""
    text = "kernels: torch's where none is named" if some else "kernels: torch's"
    if plan.env.device.type == "meta":
        text += "; meta is planned as a GPU"
    if lost:
        what = plan.env.device.type if not _on_gpu(plan) else "this dtype"
        missing = f"has none for {what}" if _TRITON else "is not installed"
        text += f"; Triton {missing}: {', '.join(sorted(lost))}"
    return text


# Steps.


_Parts = tuple[NamePart, ...]


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


def _pass_lines(plan: Plan, stage: _Stage) -> list[str]:
    steps = plan.forward if stage == "forward" else plan.backward
    if not steps:
        return [f"{stage}: none"]
    title, shown = f"{stage}:", set(range(len(steps)))
    if stage == "backward":
        title, shown = _other_steps(plan)
    folds = [
        fold_text(plan, steps, part, shown)
        for found in fold(plan, stage)
        for part in ([found] if found.saved > 1 else found.steps())
    ]
    if stage == "backward":
        folds = [entry._replace(rows=entry.rows[::-1]) for entry in folds[::-1]]
    width = max((len(row.place) for entry in folds for row in entry.rows), default=0)
    lines = [title]
    told: dict[tuple[str, ...], str] = {}
    for heading, prefix, rows in folds:
        labels = tuple(row.label for row in rows)
        before = told.get(labels) if heading else None
        if heading and rows:
            told.setdefault(labels, prefix)
            lines += wrapped(f"{heading}: as {before}" if before else f"{heading}:", 2)
        for row in () if before else rows:
            line = f"{row.place:<{width}}  {row.label}"
            lines += wrapped(line, 4 if heading else 2, width + 2)
    if stage == "backward":
        idle = [i for s in steps if not runs_backward(plan, s) for i in s.indices]
        lines += wrapped(f"no gradient is needed: {places(plan, idle)}", 2) if idle else []
    return lines


def runs_backward(plan: Plan, step: Step) -> bool:
    """Whether a step of backward computes anything."""
    return not step.indices or any(plan.needs[i] is not None for i in step.indices)


def _other_steps(plan: Plan) -> tuple[str, set[int]]:
    """The title of the backward pass, and the steps that forward does not have."""
    same = {(type(s.op), s.indices, s.fusion) for s in plan.forward}
    other = {
        n
        for n, s in enumerate(plan.backward)
        if (type(s.op), s.indices, s.fusion) not in same and runs_backward(plan, s)
    }
    title = "backward: the steps of forward in reverse"
    return (f"{title}, but" if other else title), other


class StepText(NamedTuple):
    """The text of one step, in all repetitions.

    Attributes:
        place: its operations in the first repetition, by index.
        ops: their names and kinds.
        fusion: that built the step, or its class if it covers several operations without one.
        told: what computes it, and what its operations say about themselves.
    """

    place: str
    ops: str
    fusion: str
    told: str

    @property
    def label(self) -> str:
        """All but the place, in one line."""
        fused = f" -> {self.fusion}" if self.fusion else ""
        return f"{self.ops}{fused}{f': {self.told}' if self.told else ''}"


class FoldText(NamedTuple):
    """The text of one entry of a fold.

    Attributes:
        heading: about all repetitions; empty for steps that are not repeated.
        prefix: the part of names that they share.
        rows: of the steps of one repetition.
    """

    heading: str
    prefix: str
    rows: list[StepText]


def fold_text(plan: Plan, steps: Sequence[Step], part: Fold, shown: set[int]) -> FoldText:
    """The text of one entry of a fold.

    Args:
        plan: a plan.
        steps: of one of its passes.
        part: an entry of the fold of these.
        shown: positions of the steps that the text tells of.
    """
    columns = [
        list(range(first, part.stop, part.period))
        for first in range(part.start, part.start + part.period)
    ]
    columns = [column for column in columns if not shown.isdisjoint(column)]
    ops = [_ops(plan, [steps[n] for n in column]) for column in columns]
    if part.times == 1:
        return FoldText("", "", [_row(plan, steps[c[0]], o, ()) for c, o in zip(columns, ops)])
    layer = next((found for o in reversed(ops) if (found := varying(o[-1].name))), ())
    covered = [i for n in range(part.start, part.stop) for i in steps[n].indices]
    heading = f"{part.times} times" + (f", ops {span(covered)}" if covered else "")
    if layer:
        heading = f"{_text(layer)}, {heading}"
    rows = [_row(plan, steps[c[0]], o, layer) for c, o in zip(columns, ops)]
    return FoldText(heading, _text(layer) or heading, rows)


def _ops(plan: Plan, repetitions: Sequence[Step]) -> list[_Op]:
    """The operations of a step; those that the first repetition lacks stand at the beginning."""
    if not repetitions[0].indices and not repetitions[-1].indices:
        name = joined_parts([step.path for step in repetitions])
        return [_Op(name, type(repetitions[0].op).__name__, True)]
    out: list[_Op] = []
    names = plan.names or ("",) * len(plan.basic_ops)
    size, least = len(repetitions[-1].indices), len(repetitions[0].indices)
    for behind in range(size, 0, -1):
        own = [step.indices[-behind] for step in repetitions if len(step.indices) >= behind]
        kind = type(plan.basic_ops[own[0]]).__name__
        out.append(_Op(joined_parts([names[i] for i in own]), kind, behind <= least))
    return out


def varying(name: tuple[NamePart, ...]) -> tuple[NamePart, ...]:
    """The beginning of a joined name down to the number that varies, if more follows it."""
    numbers = (n for n, part in enumerate(name[:-1]) if part.varies)
    return name[: next(numbers, -1) + 1]


def _text(name: _Parts) -> str:
    return ".".join(map(str, name))


def _row(plan: Plan, step: Step, ops: Sequence[_Op], layer: _Parts) -> StepText:
    local = [op.within(layer) for op in ops]
    if not step.indices:
        label = f"{_text(local[0].name)} {ops[0].kind} (plain module)".strip()
        instead = replacement(step.op)
        return StepText("-", label, "", f"{instead.text} can replace it" if instead else "")
    lead = [op for op in local if not op.always]
    label = " + ".join(_runs(local[len(lead) :]))
    if lead:
        label = f"({' + '.join(_runs(lead))} +) {label}"
    fused = len(step.indices) > 1 or step.fusion is not None
    fusion = (step.fusion or type(step.op).__name__) if fused else ""
    notes = dict(plan.notes)
    told = [*computed_by(plan, step)]
    told += dict.fromkeys(notes[i] for i in step.indices if i in notes)
    return StepText(span(step.indices), label, fusion, ", ".join(told))


def _runs(ops: Sequence[_Op]) -> Iterator[str]:
    """Operations with their names; neighbours share one: ``mlp.0-2 A + B + C``."""
    run: list[_Op] = []
    for op in ops:
        if run and not _follows(run[-1].name, op.name):
            yield _run(run)
            run = []
        run.append(op)
    if run:
        yield _run(run)


def _run(run: Sequence[_Op]) -> str:
    name = _text(run[0].name)
    if run[-1].name != run[0].name:
        name = f"{name}-{run[-1].name[-1]}"
    return f"{name} {' + '.join(op.kind for op in run)}".strip()


def _follows(name: _Parts, other: _Parts) -> bool:
    """Whether ``other`` is the same name, or that with the next number at its end."""
    if name == other or name[:-1] != other[:-1]:
        return name == other
    last, next_ = name[-1].text, other[-1].text
    return last.isdecimal() and next_.isdecimal() and int(next_) == int(last) + 1


# Quantised compute.


def _precision_lines(plan: Plan) -> list[str]:
    if plan.env.recipe is None:
        return []
    texts = [
        f"not {_operations(at)}: {no}"
        for no, at in _together((no, at) for at, no in plan.high_precision)
    ]
    for (_, what), ends in _together(
        ((edge.stage, str(edge).partition(": ")[2]), str(edge).partition(": ")[0])
        for edge in plan.edges
    ):
        texts.append(f"{_some(ends)}: {what}")
    for choice, at in _together((c._replace(op=0), c.op) for c in plan.gemms):
        texts.append(str(choice).replace("op 0", _operations(at), 1))
    lines = wrapped(
        f"quantised, {type(plan.env.recipe).__name__}: {joined_numbers(plan.quantized) or 'none'}"
    )
    return lines + [line for text in texts for line in wrapped(text, 2)]


def _together(pairs: Iterable[tuple[_Key, _Value]]) -> Iterable[tuple[_Key, list[_Value]]]:
    """Each key with all its values."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found.items()


def _operations(indices: Sequence[int]) -> str:
    return f"op{'s' * (len(indices) > 1)} {joined_numbers(indices)}"


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts if len(texts) <= 6 else [*texts[:4], "...", texts[-1]])

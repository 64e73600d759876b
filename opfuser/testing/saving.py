"""What a fusion saves, what reads it, and the gradients that its backward returns."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.plan import Step
from ..errors import counted, explain
from ..reading.dataflow import tensors_in
from ..registry import FusionHandle
from ..sequential import Sequential
from .calls import ERRORS, fail
from .contexts import Filled, fill, name_of
from .protocol import check_grad, mixed_dtypes
from .steps import Raw, run_backward
from .variants import Variant, incoming


class UnreadTensorWarning(UserWarning):
    """A joint fusion saves a tensor that no needed gradient reads: correct, but wasteful."""


class Unread:
    """The tensors that a joint fusion saved without need: what is said of each, once."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, int], str] = {}

    def add(self, op: int, number: int, text: str) -> None:
        """Notes a tensor: the index of the operation it was saved for, and which one of these."""
        self._texts.setdefault((op, number), text)

    def warn(self, stacklevel: int) -> None:
        """Warns of each."""
        for text in self._texts.values():
            warnings.warn(text, UnreadTensorWarning, stacklevel=stacklevel + 1)


def check_saving(
    handle: FusionHandle,
    seq: Sequential,
    inputs: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    asking: Iterable[Variant],
    where: str,
    unread: Unread,
) -> None:
    """Requires a fusion to save only what is needed, and to return gradients of the right dtype.

    Args:
        parameters: those of ``seq`` that require grad, by name.
        asking: the variants of wanted gradients.
        unread: notes what a joint fusion saves that no gradient reads, which is not wrong.
    """
    if handle.stage != "backward":
        _check_saves_nothing(handle.name, seq, inputs, parameters, f"{where}, under no_grad")
    for variant in asking:
        place = f"{where}, {variant.name}" if variant.name else where
        fused = fill(seq, inputs, [handle.name], place, parameters, variant)
        if handle.stage != "backward" and not _may_save_more(handle.name, fused):
            plain = fill(seq, inputs, [], place, parameters, variant)
            _check_bytes(fused, plain, parameters, place)
        if handle.stage != "forward":
            for step in fused.plan.backward:
                owes = any(fused.plan.needs[i] is not None for i in step.indices)
                if step.fusion == handle.name and owes:
                    backward = _Backward(step, fused)
                    backward.check(place)
                    if handle.stage == "joint":
                        backward.note_unread(place, unread)
    for p in parameters.values():
        p.requires_grad_(True)


def _check_saves_nothing(
    fusion: str,
    seq: Sequential,
    inputs: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    where: str,
) -> None:
    with torch.no_grad():
        filled = fill(seq, inputs, [fusion], where, parameters)
    for step in filled.plan.forward:
        for i in step.indices if step.fusion == fusion else ():
            kept = sum(t is not None for t in filled.contexts[i].to_save or ())
            if kept:
                fail(
                    "Nothing may be saved without ctx.requires_grad",
                    f"{where}: saved for {name_of(filled.plan, i)}",
                    counted(kept, "tensor"),
                    "Call ctx.save_for_backward only if ctx.requires_grad",
                )


def _may_save_more(fusion: str, filled: Filled) -> bool:
    """Whether the fusion declares it, or autocast is on: saved tensors may then be wider."""
    steps = [step for step in filled.plan.forward if step.fusion == fusion]
    said = any(getattr(step.op, "saves_more", False) for step in steps)
    return said or filled.plan.env.autocast_dtype is not None


def _bytes(filled: Filled, parameters: Mapping[str, Tensor]) -> int:
    """Bytes that the contexts keep alive besides parameters; each storage counts once."""
    own = {p.untyped_storage().data_ptr() for p in parameters.values()}
    kept = tensors_in([vars(ctx) for ctx in filled.contexts])
    storages = {s.data_ptr(): s.nbytes() for t in kept if (s := t.untyped_storage())}
    return sum(size for place, size in storages.items() if place not in own)


def _check_bytes(
    fused: Filled, plain: Filled, parameters: Mapping[str, Tensor], where: str
) -> None:
    ours, theirs = _bytes(fused, parameters), _bytes(plain, parameters)
    if ours > theirs:
        fail(
            f"A fusion may save {theirs} bytes, as the unfused operations do",
            where,
            f"{ours} bytes",
            "Save only what a gradient in ctx.needs reads, or set saves_more = True in the class",
        )


class _Backward:
    """The backward of one fused step, called with the contexts of a forward."""

    def __init__(self, step: Step, filled: Filled) -> None:
        self._step, self._plan, self._filled = step, filled.plan, filled
        self._ops = [filled.plan.basic_ops[i] for i in step.indices]
        last = filled.outputs[step.indices[-1]]
        self._grad_output = incoming("output", last, Variant())
        self._grad_extras = [
            [
                None if y is None else incoming(f"extra output {n}", y, Variant())
                for n, y in enumerate(filled.extra_outputs[i])
            ]
            for i in step.indices
        ]

    def _call(self, saved: Sequence[Sequence[Any]]) -> Raw:
        dy = self._grad_output.clone()
        return run_backward(self._filled, self._step, dy, self._grad_extras, saved)

    def _saved(self) -> list[list[Any]]:
        return [list(self._filled.contexts[i].to_save or ()) for i in self._step.indices]

    def check(self, where: str) -> None:
        """Requires each gradient to have the shape, device and dtype of its tensor."""
        filled, raw = self._filled, self._call(self._saved())
        owners = [("the input", filled.inputs[self._step.indices[0]], raw.input)]
        for i, op, dparams, dextras in zip(
            self._step.indices, self._ops, raw.parameters, raw.extra_inputs
        ):
            name = name_of(self._plan, i)
            for (module, parameter), grad in zip(op.parameter_slots(), dparams):
                owners.append((f"{parameter} of {name}", getattr(module, parameter), grad))
            for n, (t, grad) in enumerate(zip(filled.extra_inputs[i], dextras)):
                if t is not None:
                    owners.append((f"extra input {n} of {name}", t, grad))
        dtypes = mixed_dtypes(owner for _, owner, _ in owners)
        for name, owner, grad in owners:
            check_grad(name, owner, grad, where, dtypes)

    def note_unread(self, where: str, unread: Unread) -> None:
        """Notes each saved tensor of which other values lead to the same gradients."""
        expected = self._needed(self._call(self._saved()))
        for i, row in zip(self._step.indices, self._saved()):
            for n, t in enumerate(row):
                if t is None or not t.is_floating_point() or not t.numel():
                    continue
                if any(self._reads(i, n, other, expected) for other in _others(t)):
                    continue
                text = explain(
                    "A fusion saves what a gradient in ctx.needs reads, and nothing else",
                    where=f"{where}: saved for {name_of(self._plan, i)}",
                    received=f"tensor {n}, {t.dtype}, shape {tuple(t.shape)}, {t.nbytes} bytes, "
                    "which none reads",
                    remedy="Ask ctx.needs before saving; keep dtypes and shapes on the context",
                )
                unread.add(i, n, text)

    def _reads(self, i: int, n: int, other: Tensor, expected: Sequence[Tensor | None]) -> bool:
        saved = self._saved()
        saved[self._step.indices.index(i)][n] = other
        try:
            made = self._needed(self._call(saved))
        except ERRORS:
            return True
        return any(
            (a is None) != (b is None)
            or (a is not None and b is not None and not torch.equal(a, b))
            for a, b in zip(made, expected)
        )

    def _needed(self, raw: Raw) -> list[Tensor | None]:
        """The gradients in ``ctx.needs``."""
        needs = [self._filled.contexts[i].needs for i in self._step.indices]
        out = [raw.input if needs[0].input else None]
        for need, dparams, dextras in zip(needs, raw.parameters, raw.extra_inputs):
            out += [g for g, needed in zip(dparams, need.parameters) if needed]
            out += [g for g, needed in zip(dextras, need.extra_inputs) if needed]
        return out


def _others(t: Tensor) -> Iterator[Tensor]:
    """Other values of a tensor, of which at least one changes any function of it."""
    yield torch.full_like(t, torch.nan)
    yield torch.full_like(t, 100.0)
    yield torch.full_like(t, -100.0)

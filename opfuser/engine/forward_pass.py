"""The forward pass over the steps of a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from ..buffer_reuse import only_memory
from ..errors import (
    ContextError,
    ExtraOutputCountError,
    HiddenOutputError,
    InputError,
    counted,
    explain,
)
from ..op import OperationContext, new_context
from ..op.results import forward_parts, refuse_output, row_of_outputs
from ..quantization.watch import is_watched
from .ranges import forward_ranges
from .routing import Slot
from .schedule import ForwardStep, GeneralForward, Schedule
from .verification import Verification, name_of

__all__ = ["Kwargs", "Tape", "execute_forward"]

Kwargs = Sequence[dict[str, Any]] | None

_NO_EXTRAS: dict[str, Any] = {
    "basic_op_extra_inputs": [()],
    "prev_op_grad_output_quantizer": None,
    "next_op_input_quantizer": None,
}


class Tape:
    """What forward hands to backward: a context per basic operation, and the saved tensors."""

    def __init__(self) -> None:
        self.contexts: list[OperationContext] = []
        self.saved: list[Tensor | None] = []
        self.verification: Verification | None = None

    def add(self, ctx: OperationContext) -> None:
        self.contexts.append(ctx)
        if ctx.to_save is not None:
            if ctx.requires_grad:
                start = len(self.saved)
                self.saved.extend(ctx.to_save)
                ctx.span = (start, len(self.saved))
            ctx.to_save = None

    def add_step(self, ctxs: Sequence[OperationContext]) -> None:
        self.contexts += ctxs
        saved = self.saved
        for ctx in ctxs:
            if ctx.to_save is not None:
                if ctx.requires_grad:
                    start = len(saved)
                    saved += ctx.to_save
                    ctx.span = (start, len(saved))
                ctx.to_save = None


def execute_forward(  # noqa: PLR0912 - a function for each branch would cost every call
    schedule: Schedule, kwargs: Kwargs, x: Tensor, extra_inputs: Sequence[Tensor], tape: Tape | None
) -> tuple[Tensor, list[Tensor]]:
    """The output and extra outputs of the forward steps; ``tape`` records what backward needs."""
    produced: dict[Slot, Tensor] = {}
    first = 0
    traced = torch.compiler.is_compiling()
    verification = None
    if not traced and schedule.verified is not None:
        verification = _verification(schedule.verified, x, tape)
    ranged = not traced and profiler._is_profiler_enabled
    steps: Iterable[ForwardStep] = forward_ranges(schedule) if ranged else schedule.forward
    general = None
    try:
        for op, first, needs, constant, freezes, general in steps:
            if verification is not None:
                step = name_of(first, op) if general is None else general.name
                verification.before_forward(first, step, x)
            if general is not None:
                ctxs = _contexts(general, traced)
                if tape is None and general.overwrites:
                    _permit_overwriting(general, ctxs, x, extra_inputs, produced)
                x = _general_forward(op, general, ctxs, x, extra_inputs, kwargs, produced)
                if tape is not None:
                    if general.notes_output and not traced:
                        ctxs[-1].output_like = (x.shape, x.dtype, x.device)
                    tape.add_step(ctxs)
                continue
            ctx = constant or new_context(needs, _settings(op, traced) if freezes else None)
            own = None if kwargs is None else kwargs[first]
            if not own:
                x = op.op_forward(
                    ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
                )
            else:
                x, _ = op.fuser_forward([ctx], x, **_NO_EXTRAS, basic_op_kwargs=[own])
            if tape is not None:
                if constant is None:
                    tape.add(ctx)
                else:
                    tape.contexts.append(constant)
    except InputError as error:
        if len(schedule.plan.basic_ops) == 1 or torch.compiler.is_compiling():
            raise
        place = name_of(first, op) if general is None else general.name
        raise InputError(f"{error} It came to {place} of the sequence.") from error
    except ContextError as error:
        place = name_of(first, op) if general is None else general.name
        raise type(error)(f"{error} It happened in the forward of {place}.") from error
    if not isinstance(x, Tensor):
        raise refuse_output(name_of(first, op) if general is None else general.name, x)
    if verification is not None:
        contexts, saved = (None, ()) if tape is None else (tape.contexts, tape.saved)
        verification.after_forward(schedule.plan.basic_ops, contexts, saved)
    return x, [produced[slot] for slot in schedule.outputs]


def _verification(verified: set[Any], x: Tensor, tape: Tape | None) -> Verification | None:
    """That of a call with this input, unless the like of it was verified before."""
    kind = x.dim(), tape is None
    if kind in verified:
        return None
    verification = Verification(verified, kind)
    if tape is not None:
        tape.verification = verification
    return verification


def _contexts(general: GeneralForward, traced: bool) -> list[OperationContext]:
    ctxs = []
    for needs, basic in general.contexts:
        ctx = OperationContext()  # as new_context, without a call for each
        if basic is not None:
            ctx.settings = _settings(basic, traced)
        if needs is None:
            ctx.requires_grad = False
        else:
            ctx.needs = needs
        ctxs.append(ctx)
    return ctxs


def _settings(op: Any, traced: bool) -> Any:
    """``op.settings``, without one check per operation whether torch.compile traces."""
    return op.make_settings() if traced else op.__dict__.get("_settings") or op.settings


def _general_forward(
    op: Any,
    general: GeneralForward,
    ctxs: list[OperationContext],
    x: Tensor,
    extra_inputs: Sequence[Tensor],
    kwargs: Kwargs,
    produced: dict[Slot, Tensor],
) -> Tensor:
    count = len(ctxs)
    given: list[Sequence[Tensor | None]] = [()] * count
    for n, sources in general.sources:
        given[n] = [_fetch(source, asks, extra_inputs, produced) for source, asks in sources]
    for slot in general.frees:
        produced.pop(slot, None)  # before the call, which may then hold the only reference
    before, behind = general.quantizers
    if behind is not None and is_watched():
        behind = None  # where codes are told of, who multiplies by them makes them
    result = op.fuser_forward(
        ctxs,
        x,
        basic_op_extra_inputs=given,
        prev_op_grad_output_quantizer=before,
        next_op_input_quantizer=behind,
        basic_op_kwargs=[{}] * count if kwargs is None else [kwargs[i] for i in general.indices],
    )
    try:
        x, extra_outputs = result
        found = len(extra_outputs)
    except (TypeError, ValueError) as error:
        raise refuse_output(general.name, result) from error
    if type(extra_outputs) is not list:
        forward_parts(general.name, result)  # a tuple will do as well, rows of a tensor will not
    if found != count:
        raise ExtraOutputCountError(
            explain(
                f"Expected extra outputs for {counted(count, 'basic operation')}, but got {found}",
                where=general.name,
                remedy="Return a list of extra outputs for each of them from fuser_forward, "
                "empty for one that has none",
            )
        )
    for row in extra_outputs:
        if not general.silent or type(row) is not tuple or row:
            _place_extra_outputs(general, extra_outputs, produced)
            for slot in general.frees:
                produced.pop(slot, None)
            break
    return x


def _permit_overwriting(
    general: GeneralForward,
    ctxs: list[OperationContext],
    x: Tensor,
    extra_inputs: Sequence[Tensor],
    produced: dict[Slot, Tensor],
) -> None:
    """Sets for operations with ``in_place`` whether they may overwrite their extra input."""
    for n, op, at in general.overwrites:
        if op.in_place:
            others = [x, *produced.values(), *extra_inputs[:at], *extra_inputs[at + 1 :]]
            ctxs[n].may_overwrite = only_memory(extra_inputs[at], others)


def _place_extra_outputs(
    general: GeneralForward,
    extra_outputs: Sequence[Sequence[Tensor | None]],
    produced: dict[Slot, Tensor],
) -> None:
    for n, i, slots in general.outputs:
        ys = extra_outputs[n]
        if type(ys) is not tuple and type(ys) is not list:
            ys = row_of_outputs(general.name, f"op {i}", ys)
        if len(ys) != len(slots):
            raise ExtraOutputCountError(
                explain(
                    f"Expected op {i} to generate {counted(len(slots), 'extra output')}, "
                    f"but got {len(ys)}",
                    where=general.name,
                    remedy="Return one tensor for each of its num_extra_outputs",
                )
            )
        for y, (slot, wanted) in zip(ys, slots):
            if y is not None:
                produced[slot] = y
            elif wanted:
                raise HiddenOutputError(_hidden_output(*slot, wanted, general.name))


def _fetch(
    source: Slot | int | None,
    asks: bool,
    extra_inputs: Sequence[Tensor],
    produced: dict[Slot, Tensor],
) -> Tensor | None:
    if source is None:
        return None
    if isinstance(source, int):
        return extra_inputs[source]
    y = produced[source]
    if asks and not y.requires_grad and y.is_floating_point():
        # Operations written for te.ops read requires_grad to decide what to save. It is set on
        # another tensor object, since this one may be the caller's.
        y = y.detach().requires_grad_()
    return y


def _hidden_output(op: int, slot: int, reason: str, where: str) -> str:
    if reason == "public":
        what = f"Extra output {slot} of op {op} is public, but None was returned for it"
    else:
        what = (
            f"Extra output {slot} of op {op} is read by an operation outside its forward fusion, "
            "but None was returned for it"
        )
    return explain(what, where=where, remedy="Return the tensor from fuser_forward")

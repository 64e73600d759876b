"""The forward walk over the steps of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import (
    ArgumentTypeError,
    ExtraOutputCountError,
    HiddenOutputError,
    InputError,
    explain,
)
from .op import OperationContext, new_context
from .program import GeneralForward, Program
from .wiring import Slot

__all__ = ["Kwargs", "Tape", "walk_forward"]

Kwargs = Sequence[dict[str, Any]] | None

_NO_EXTRAS: dict[str, Any] = {
    "basic_op_extra_inputs": [()],
    "prev_op_grad_output_quantizer": None,
    "next_op_input_quantizer": None,
}


class Tape:
    """What the forward walk leaves for backward: a context per basic operation, and the tensors."""

    def __init__(self) -> None:
        self.contexts: list[OperationContext] = []
        self.saved: list[Tensor | None] = []

    def add(self, ctx: OperationContext) -> None:
        self.contexts.append(ctx)
        if ctx.to_save is not None:
            if ctx.requires_grad:
                start = len(self.saved)
                self.saved.extend(ctx.to_save)
                ctx.span = (start, len(self.saved))
            ctx.to_save = None

    def add_step(self, ctxs: Sequence[OperationContext], output: Tensor) -> None:
        if not torch.compiler.is_compiling():
            ctxs[-1].output_like = (output.shape, output.dtype, output.device)
        for ctx in ctxs:
            self.add(ctx)


def walk_forward(
    program: Program, kwargs: Kwargs, x: Tensor, extra_inputs: Sequence[Tensor], tape: Tape | None
) -> tuple[Tensor, list[Tensor]]:
    """Runs the forward steps and records on ``tape`` what their backward needs."""
    produced: dict[Slot, Tensor] = {}
    first = 0
    try:
        for op, first, needs, constant, general in program.forward:
            if general is not None:
                ctxs = [new_context(needs) for needs in general.needs]
                x = _general_forward(op, general, ctxs, x, extra_inputs, kwargs, produced)
                if tape is not None:
                    tape.add_step(ctxs, x)
                continue
            ctx = constant or new_context(needs)
            if kwargs is None:
                x = op.op_forward(
                    ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
                )
            else:
                x, _ = op.fuser_forward([ctx], x, **_NO_EXTRAS, basic_op_kwargs=[kwargs[first]])
            if tape is not None:
                if constant is None:
                    tape.add(ctx)
                else:
                    tape.contexts.append(constant)
    except InputError as error:
        if len(program.plan.basic_ops) == 1 or torch.compiler.is_compiling():
            raise
        place = f"op {first} ({type(op).__name__})" if general is None else general.name
        raise InputError(f"{error} It came to {place} of the sequence.") from error
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(
            explain(
                "The forward of an operation returns a tensor",
                where=f"op {first} ({type(op).__name__})",
                received=type(x).__name__,
            )
        )
    return x, [produced[slot] for slot in program.outputs]


def _general_forward(
    op: Any,
    general: GeneralForward,
    ctxs: list[OperationContext],
    x: Tensor,
    extra_inputs: Sequence[Tensor],
    kwargs: Kwargs,
    produced: dict[Slot, Tensor],
) -> Tensor:
    x, extra_outputs = op.fuser_forward(
        ctxs,
        x,
        basic_op_extra_inputs=[
            [_fetch(source, extra_inputs, produced) for source in sources]
            for sources in general.sources
        ],
        prev_op_grad_output_quantizer=None,
        next_op_input_quantizer=None,
        basic_op_kwargs=[{} if kwargs is None else kwargs[i] for i in general.indices],
    )
    if len(extra_outputs) != len(general.indices):
        raise ExtraOutputCountError(
            explain(
                f"Expected extra outputs for {len(general.indices)} basic operations, "
                f"but got {len(extra_outputs)}",
                where=general.name,
            )
        )
    for i, ys, wanted in zip(general.indices, extra_outputs, general.wanted):
        if len(ys) != len(wanted):
            raise ExtraOutputCountError(
                explain(
                    f"Expected op {i} to generate {len(wanted)} extra outputs, but got {len(ys)}",
                    where=general.name,
                )
            )
        for s, y in enumerate(ys):
            if y is not None:
                produced[Slot(i, s)] = y
            elif wanted[s]:
                raise HiddenOutputError(_hidden_output(i, s, wanted[s], general.name))
    for slot in general.frees:
        produced.pop(slot, None)
    return x


def _fetch(
    source: Slot | int | None, extra_inputs: Sequence[Tensor], produced: dict[Slot, Tensor]
) -> Tensor | None:
    if source is None:
        return None
    return extra_inputs[source] if isinstance(source, int) else produced[source]


def _hidden_output(op: int, slot: int, reason: str, where: str) -> str:
    if reason == "public":
        what = f"Extra output {slot} of op {op} is public, but None was returned for it"
    else:
        what = (
            f"Extra output {slot} of op {op} is read by an operation outside its forward fusion, "
            "but None was returned for it"
        )
    return explain(what, where=where, remedy="Return the tensor from fuser_forward")

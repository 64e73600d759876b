"""Both passes of a call: a program's functions, and what surrounds them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_internals as internals
from ..core.buffer_reuse import only_reference
from ..core.context import OperationContext, held
from ..core.fusion import Stage
from ..core.op_base.results import refuse_output
from ..errors import CacheFullError, ContextError, InputError
from .emission import Emission, step_name
from .plan import Step
from .program import Program
from .ranges import place
from .recorded.guards import Keywords, keywords_of
from .recorded.specialized import Backward, Specialization
from .verification import Verification

Kwargs = Sequence[dict[str, Any]] | None


class Tape:
    """What forward hands to backward: a context per basic operation, and the saved tensors.

    Attributes:
        special: what was recorded of the call, if it was.
    """

    def __init__(self) -> None:
        self.contexts: list[OperationContext] = []
        self.saved: list[Tensor | None] = []
        self.verification: Verification | None = None
        self.special: Specialization | None = None

    def add(self, *ctxs: OperationContext) -> None:
        """Takes the contexts of a step, and what its operations have saved."""
        self.contexts += ctxs
        saved = self.saved
        for ctx in ctxs:
            if ctx.to_save is not None:
                if ctx.requires_grad:
                    start = len(saved)
                    # A list: Dynamo of torch 2.11 adds no map to one.
                    saved += [held(t) for t in ctx.to_save]
                    ctx._span = (start, len(saved))
                ctx.to_save = None


def execute_forward(
    program: Program,
    kwargs: Kwargs,
    x: Tensor,
    extra_inputs: Sequence[Tensor],
    tape: Tape | None,
    parameters: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The output and extra outputs of a forward pass.

    Args:
        program: what is executed.
        kwargs: keywords of each operation, or None.
        x: the input.
        extra_inputs: of all operations.
        tape: records what backward needs, or None.
        parameters: of all operations; without, nothing is recorded.
    """
    recorded = program.specializations
    if (
        parameters is not None
        and recorded.refusal is None
        and not internals.is_profiled()
        and (keywords := keywords_of(kwargs)) is not None
    ):
        tensors = *extra_inputs, *keywords.tensors
        kind = recorded.kind_due(x, parameters, tensors, keywords.facts)
        if kind is not None:
            own = parameters, keywords, kind
            return _record_forward(program, kwargs, x, extra_inputs, tape, *own)
    verification = _verification(program, x, tape)
    function = program.function("forward", _emission(verification))
    if verification is not None and tape is not None:
        verification.lend("an input that requires grad", [*filter(_trained, (x, *extra_inputs))])
    try:
        x, outputs = function(x, extra_inputs, _each(kwargs, program), tape, verification)
    except Exception as error:
        tell_step(error, program, "forward")
        raise
    if not isinstance(x, Tensor):
        raise refuse_output(step_name(program.plan.forward[-1]), x)
    if verification is not None:
        contexts, saved = (None, ()) if tape is None else (tape.contexts, tape.saved)
        verification.after_forward(program.plan.basic_ops, contexts, saved)
    return x, outputs


def _record_forward(
    program: Program,
    kwargs: Kwargs,
    x: Tensor,
    extra_inputs: Sequence[Tensor],
    tape: Tape | None,
    parameters: Sequence[Tensor],
    keywords: Keywords,
    kind: tuple[Hashable, Hashable],
) -> tuple[Tensor, list[Tensor]]:
    """As :func:`execute_forward`; what it does is recorded for calls to come.

    Args:
        program, kwargs, x, extra_inputs, tape, parameters: as there.
        keywords: those in ``kwargs``.
        kind: of the call.
    """
    recorded = program.specializations
    kept = (*keywords.tensors, *recorded.kept())
    recorder = recorded.recorder(program, x, parameters, extra_inputs, kept, keywords.caches)
    with recorder.watching():
        results = execute_forward(program, kwargs, x, extra_inputs, tape)
    contexts, saved = ([], []) if tape is None else (tape.contexts, tape.saved)
    arguments = x, parameters, extra_inputs, kept
    made = recorded.add(program, recorder, arguments, results, contexts, saved, kind)
    if tape is not None:
        tape.special = made
    return results


def tell_step(error: Exception, program: Program, stage: Stage) -> None:
    """Adds a note of which step an error came, or raises one like it whose text says so."""
    step = program.step_of(error)
    of_input = stage == "forward" and isinstance(error, InputError)
    if isinstance(error, ContextError) or (of_input and len(program.plan.basic_ops) > 1):
        raise _located(error, step, program, stage) from error
    _note(error, step, program, stage)


def _located(error: Exception, step: Step | None, program: Program, stage: Stage) -> Exception:
    """An error like another one, whose text says of which step that came.

    No frame through which it is raised may have a name for it: the two would be a cycle.
    """
    name = "" if step is None else step_name(step)
    if isinstance(error, ContextError):
        other: Exception = type(error)(f"{error} It happened in the {stage} of {name}.")
    else:
        kind = CacheFullError if isinstance(error, CacheFullError) else InputError
        other = kind(f"{error} It was raised in {name} of the sequence.")
    _note(other, step, program, stage)
    return other


def _note(error: Exception, step: Step | None, program: Program, stage: Stage) -> None:
    """Notes on an exception of which step it came, and where that stands in the model.

    Not of an operation that is called alone: the note would only repeat its name.
    """
    if sys.version_info < (3, 11) or step is None:
        return
    where = place(program.paths, step)
    if where or len(program.plan.basic_ops) > 1:
        at = f" at {where}" if where else ""
        error.add_note(f"opfuser: in the {stage} of {step_name(step)}{at}")


def traced_forward(
    program: Program, kwargs: Kwargs, x: Tensor, extra_inputs: Sequence[Tensor], tape: Tape | None
) -> tuple[Tensor, list[Tensor]]:
    """As :func:`execute_forward`, for torch.compile and torch.export to trace."""
    x, outputs = program.traced("forward")(x, extra_inputs, _each(kwargs, program), tape, None)
    if not isinstance(x, Tensor):
        raise refuse_output(step_name(program.plan.forward[-1]), x)
    return x, outputs


def _trained(t: Tensor) -> bool:
    return t.requires_grad


def _each(kwargs: Kwargs, program: Program) -> Sequence[dict[str, Any]]:
    """Keywords for each operation."""
    return kwargs or [{} for _ in program.plan.basic_ops]


def _emission(verification: Verification | None) -> Emission:
    return Emission(verification is not None, internals.is_profiled())


def _verification(program: Program, x: Tensor, tape: Tape | None) -> Verification | None:
    """Returns the verification of this call, or None if an equal call was verified before."""
    kind = x.dim(), tape is None
    if program.verified is None or kind in program.verified:
        return None
    verification = Verification(program, kind)
    if tape is not None:
        tape.verification = verification
    return verification


def _borrowed(t: Tensor | None) -> Tensor | None:
    """A view of a tensor that hooks of a caller returned: nobody takes it for the only reference.

    The hooks may keep its memory by other means than a tensor, for a second backward.
    """
    return t if t is None or t.layout is not torch.strided else t.view_as(t)


def backward_of_eager(
    func_ctx: Any, dx: Tensor, grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """As :func:`execute_backward`, traced though the call was not."""
    tensors = func_ctx.saved_tensors
    program, contexts, marked, hooked, *_ = func_ctx.forwarded
    saved = _saved_by_forward(tensors, marked, hooked)
    grads: list[Tensor | None] = program.traced("backward")(dx, grad_outputs, contexts, saved, None)
    return grads


def _saved_by_forward(
    tensors: Sequence[Tensor | None], marked: bool, hooked: bool
) -> list[Tensor | None]:
    saved: list[Tensor | None] = list(tensors)
    if marked:
        del saved[0]
    if hooked:
        saved = list(map(_borrowed, saved))
    return saved


def execute_backward(
    func_ctx: Any, dx: Tensor | None, grad_outputs: Sequence[Tensor | None], keep: bool
) -> list[Tensor | None]:
    """The gradients of input, parameters and extra inputs.

    Args:
        func_ctx: has the ``saved_tensors`` of a forward pass, and ``forwarded``: the program, the
            contexts, whether a mark of a checkpoint comes first, whether hooks of a caller returned
            the tensors, the verification, and the specialization that has run or None.
        dx: gradient of the output.
        grad_outputs: of the extra outputs.
        keep: whether another backward pass may follow.
    """
    tensors = func_ctx.saved_tensors  # raises in a second pass over a graph that is gone
    program, contexts, marked, hooked, verification, special = func_ctx.forwarded
    saved = _saved_by_forward(tensors, marked, hooked)
    del tensors
    if saved and not keep and internals.CAN_CLEAR:
        func_ctx.maybe_clear_saved_tensors()
        func_ctx.forwarded = None
    how = contexts, verification
    if special is None or hooked or dx is None or internals.is_profiled():
        return _run_backward(program, dx, grad_outputs, saved, *how)
    recorded = program.specializations
    kept = recorded.kept()
    found = recorded.find_backward(special, dx, grad_outputs, saved, kept, keep)
    if found is not None:
        return run_recorded_backward(program, special, found, dx, grad_outputs, saved, kept)
    due = recorded.due_backward(program, special, dx, grad_outputs, saved, kept, keep)
    if due is None:
        return _run_backward(program, dx, grad_outputs, saved, *how)
    with due.recorder.watching():
        grads = _run_backward(program, dx, grad_outputs, saved, *how)
    recorded.add_backward(program, due, grads)
    return grads


def run_recorded_backward(
    program: Program,
    special: Specialization,
    found: Backward,
    dy: Tensor,
    received: Sequence[Tensor | None],
    saved: list[Tensor | None],
    kept: Sequence[Tensor],
) -> list[Tensor | None]:
    """As :func:`execute_backward`, by what was recorded of a pass like it.

    Args:
        program: whose pass it is.
        special: of its forward.
        found: what was recorded.
        dy, received: gradients of the output and of the extra outputs.
        saved: what forward has saved. Nothing else refers to the list.
        kept: what operations read besides.
    """
    if found.reused and not all(only_reference(saved, n) for n in found.reused):
        return _run_backward(program, dy, received, saved, special.contexts, None)
    try:
        return found.function(dy, received, saved, kept)
    except Exception as error:
        _note(error, program.step_of(error), program, "backward")
        raise


def _run_backward(
    program: Program,
    dx: Tensor | None,
    grad_outputs: Sequence[Tensor | None],
    saved: list[Tensor | None],
    contexts: Sequence[OperationContext],
    verification: Verification | None,
) -> list[Tensor | None]:
    """As :func:`execute_backward`, by the function of the program."""
    function = program.function("backward", _emission(verification))
    if verification is not None:
        verification.lend("the gradient of the output", [dx])
    try:
        grads: list[Tensor | None] = function(dx, grad_outputs, contexts, saved, verification)
    except Exception as error:
        tell_step(error, program, "backward")
        raise
    if verification is not None:
        verification.at_the_end(grads[1:])
    return grads

"""The backward pass over the steps of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import profiler

from ..errors import (
    ContextError,
    ExtraInputGradientCountError,
    ParameterGradientCountError,
    counted,
    explain,
)
from ..op import OperationContext
from ..op.results import backward_parts, refuse_grads, row_of_grads
from ..quantization.watch import is_watched
from ..wgrad_overlap import OverlappedPass, WgradOverlap
from .ranges import backward_ranges
from .routing import Slot
from .schedule import BackwardStep, GeneralBackward, Schedule
from .verification import name_of

__all__ = ["execute_backward", "zeros"]

# Releases a node's saved tensors while its backward still runs. Without it, the tensors of a whole
# group would stay allocated until its last gradient is computed.
_CAN_CLEAR = hasattr(torch._C._FunctionBase, "maybe_clear_saved_tensors")


def zeros(like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    """The zero gradient of an output of that shape, dtype and device."""
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


class _RevivedContext(OperationContext):
    """The context of an operation in backward: attributes set in forward, and saved tensors.

    Attributes are looked up in the context of forward, which is never written to, so that a second
    backward reads the same values.
    """

    kept: OperationContext

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Backward fusions written for te.ops also read what te.ops' own forwards set.
            if name in _LEFT_BY_TE_OPS and not hasattr(self.kept, name):
                return _LEFT_BY_TE_OPS[name](self)
            return getattr(self.kept, name)


_LEFT_BY_TE_OPS: dict[str, Callable[[OperationContext], Any]] = {
    "dtype": lambda ctx: next((t.dtype for t in ctx.saved_tensors or () if t is not None), None),
    "input_requires_grad": lambda ctx: ctx.needs.input,
    "weight_requires_grad": lambda ctx: any(ctx.needs.parameters),
    "with_quantized_compute": lambda ctx: False,
    **{
        f"{name}_quantizer": lambda ctx: None
        for name in ("input", "weight", "grad_output", "grad_input", "prev_op_grad_output")
    },
}


def _revive(
    kept: OperationContext,
    saved: list[Tensor | None],
    parameters: tuple[int, int] | None,
    base: int,
) -> OperationContext:
    """The context of one operation for its backward.

    Its tensors are removed from ``saved``, so that they are freed once its backward has run.

    Args:
        kept: that of forward.
        saved: by all operations, and then the parameters that backward reads.
        parameters: which of the latter are the operation's, if its backward reads them.
        base: where they begin.
    """
    ctx = _RevivedContext()
    ctx.kept = kept
    ctx.requires_grad = kept.requires_grad
    ctx.needs = kept.needs
    ctx.settings = kept.settings
    if kept.output_like is not None:
        ctx.output_like = kept.output_like
    if kept.span is not None:
        start, stop = kept.span
        ctx.saved_tensors = tuple(saved[start:stop])
        saved[start:stop] = [None] * (stop - start)
    if parameters is not None:
        start, stop = parameters
        ctx.parameters = tuple(saved[base + start : base + stop])
    return ctx


def _revive_all(
    general: GeneralBackward,
    contexts: Sequence[OperationContext],
    saved: list[Tensor | None],
    base: int,
) -> list[OperationContext]:
    """The contexts of a step; ``base`` is where the kept parameters begin in ``saved``."""
    ctxs = []
    for i, reads in general.contexts:
        kept = contexts[i]
        if kept.span is not None or reads is not None:
            kept = _revive(kept, saved, reads, base)
        ctxs.append(kept)
    if general.quantizer is not None and not is_watched():
        if ctxs[0] is contexts[general.contexts[0][0]]:  # that of forward, never written to
            ctxs[0] = _revive(ctxs[0], saved, None, base)
        ctxs[0].grad_input_quantizer = general.quantizer
    return ctxs


def _borrowed(t: Tensor | None) -> Tensor | None:
    """A view of a tensor that hooks of a caller returned: nobody takes it for the only reference.

    The hooks may keep its memory by other means than a tensor, for a second backward.
    """
    return t if t is None or t.layout is not torch.strided else t.view_as(t)


def _overlap(overlap: WgradOverlap, device: torch.device) -> OverlappedPass | None:
    return None if torch.compiler.is_compiling() else overlap.begin(device)


def execute_backward(  # noqa: PLR0912, PLR0915 - a function for each branch would cost every call
    func_ctx: Any, dx: Tensor | None, grad_outputs: Sequence[Tensor | None], keep: bool
) -> list[Tensor | None]:
    """The gradients of input, parameters and extra inputs, computed by the backward steps."""
    saved: list[Tensor | None] = list(func_ctx.saved_tensors)
    schedule, contexts, marked, hooked, verification = func_ctx.forwarded
    if marked:
        del saved[0]
    if hooked:
        saved = list(map(_borrowed, saved))
    if saved and not keep and _CAN_CLEAR:
        func_ctx.maybe_clear_saved_tensors()
        func_ctx.forwarded = None
    base = len(saved) - len(schedule.kept_parameters)
    grads_of: dict[Slot, Tensor] = {}
    for slot, grad in zip(schedule.outputs, grad_outputs):
        if grad is not None:
            grads_of[slot] = grad
    param_grads: list[Tensor | None] = [None] * schedule.num_parameters
    extra_grads: list[Tensor | None] = [None] * schedule.num_extra_inputs

    overlap = schedule.overlap and _overlap(schedule.overlap, schedule.plan.env.device)
    ranged = not torch.compiler.is_compiling() and profiler._is_profiler_enabled
    steps: Iterable[BackwardStep] = backward_ranges(schedule) if ranged else schedule.backward
    try:
        for op, index, (start, stop), reads, constant, general in steps:
            if general is not None:
                ctxs = _revive_all(general, contexts, saved, base)
                dx = _general_backward(
                    schedule, op, general, ctxs, dx, grads_of, param_grads, extra_grads
                )
                ctxs = []
            else:
                ctx = constant or contexts[index]
                if constant is None and (ctx.span is not None or reads is not None):
                    ctx = _revive(ctx, saved, reads, base)
                if dx is None:
                    continue
                result = op.op_backward(ctx, dx)
                try:
                    dx, grads = result
                except (TypeError, ValueError) as error:
                    raise refuse_grads(name_of(index, op), result) from error
                ctx = result = None
                if type(grads) is tuple and len(grads) == stop - start:
                    param_grads[start:stop] = grads
                else:
                    _place_parameter_grads(schedule, index, grads, param_grads)
            if verification is not None:
                step = name_of(index, op) if general is None else general.name
                verification.after_backward(schedule, index, step, dx)
    except ContextError as error:
        place = name_of(index, op) if general is None else general.name
        raise type(error)(f"{error} It happened in the backward of {place}.") from error
    finally:
        if overlap is not None:
            overlap.end()
    if not schedule.input_needs_grad:
        dx = None
    if verification is not None:
        verification.at_the_end([*param_grads, *extra_grads])
    return [dx, *param_grads, *extra_grads]


def _place_parameter_grads(
    schedule: Schedule, index: int, grads: Any, param_grads: list[Tensor | None]
) -> None:
    start, stop = schedule.spans[index]
    if grads is None:
        return
    step = name_of(index, schedule.plan.basic_ops[index])
    if isinstance(grads, Tensor) or not isinstance(grads, Iterable):
        raise refuse_grads(step, (None, grads))
    grads = tuple(grads)
    if len(grads) != stop - start:
        raise ParameterGradientCountError(
            explain(
                f"Expected op {index} to generate {stop - start} param grads, but got {len(grads)}",
                where=step,
                remedy="Return one gradient or None per parameter, in registration order",
            )
        )
    if grads:
        param_grads[start:stop] = grads


def _general_backward(
    schedule: Schedule,
    op: Any,
    general: GeneralBackward,
    ctxs: list[OperationContext],
    dx: Tensor | None,
    grads_of: dict[Slot, Tensor],
    param_grads: list[Tensor | None],
    extra_grads: list[Tensor | None],
) -> Tensor | None:
    count = len(ctxs)
    grad_extra_outputs: list[Sequence[Tensor | None]] = [()] * count
    for n, slots in general.outputs:
        grad_extra_outputs[n] = [grads_of.pop(slot, None) for slot in slots]
    if dx is None:
        # The operations behind this step return no gradient, so that of its output is zero.
        given = [g for gs in grad_extra_outputs for g in gs if g is not None]
        if not given:
            return None
        like = ctxs[-1].output_like or (given[0].shape, given[0].dtype, given[0].device)
        dx = zeros(like)
    result = op.fuser_backward(ctxs, dx, basic_op_grad_extra_outputs=grad_extra_outputs)
    try:
        dx, params, extras = result
        found = len(params), len(extras)
    except (TypeError, ValueError) as error:
        raise refuse_grads(general.name, result) from error
    if type(params) is not list or type(extras) is not list:
        backward_parts(general.name, result)  # tuples will do as well, rows of a tensor will not
    if found != (count, count):
        raise ParameterGradientCountError(
            explain(
                f"Expected gradients for {counted(count, 'basic operation')}, but got "
                f"{counted(found[0], 'list')} of param grads and {found[1]} of extra-input grads",
                where=general.name,
                remedy="Return one tuple of each for each basic operation from fuser_backward, "
                "empty for one without",
            )
        )
    for n, i, start, stop in general.parameters:
        grads = params[n]
        if type(grads) is tuple and len(grads) == stop - start:
            if grads:
                param_grads[start:stop] = grads
        else:
            _place_parameter_grads(schedule, i, grads, param_grads)
    for row in extras:
        if general.takes or type(row) is not tuple or row:
            _place_extra_grads(general, extras, grads_of, extra_grads)
            break
    return dx


def _place_extra_grads(
    general: GeneralBackward,
    extras: Sequence[Sequence[Tensor | None] | None],
    grads_of: dict[Slot, Tensor],
    extra_grads: list[Tensor | None],
) -> None:
    for n, i, targets in general.targets:
        dextras = extras[n]
        if dextras is None:
            continue
        if type(dextras) is not tuple and type(dextras) is not list:
            dextras = row_of_grads(general.name, f"op {i}", dextras)
        if len(dextras) != len(targets):
            raise ExtraInputGradientCountError(
                explain(
                    f"Expected op {i} to generate grads for "
                    f"{counted(len(targets), 'extra input')}, but got {len(dextras)}",
                    where=general.name,
                    remedy="Return one gradient or None for each of its extra inputs",
                )
            )
        for grad, target in zip(dextras, targets):
            if grad is None or target is None:
                continue
            if isinstance(target, int):
                extra_grads[target] = grad
            else:
                earlier = grads_of.get(target)
                grads_of[target] = grad if earlier is None else earlier + grad

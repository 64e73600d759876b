"""Executing a plan: the only autograd.Function, and the walks over the steps of each pass.

Everything that does not change from call to call was laid out in a ``Program`` when the plan was
made; the walks only follow it. They are written so that ``torch.compile`` can trace them: no
attribute is read off a tensor, and a context of forward is not changed in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import (
    ArgumentTypeError,
    DoubleBackwardError,
    ExtraInputGradientCountError,
    ExtraOutputCountError,
    HiddenOutputError,
    InputError,
    ParameterGradientCountError,
    explain,
)
from .op import OperationContext, new_context
from .program import GeneralBackward, GeneralForward, Program
from .wiring import Slot

Kwargs = Sequence[dict[str, Any]] | None

__all__ = ["Kwargs", "Tape", "run", "walk_forward"]

_OLD_DYNAMO = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)

# Frees what a node saved while its backward still runs; without it the memory of a whole sequence
# would be held until the last of its gradients is made.
_CAN_CLEAR = hasattr(torch._C._FunctionBase, "maybe_clear_saved_tensors")


def run(
    program: Program,
    input_: Tensor,
    parameters: Sequence[Tensor],
    extra_inputs: Sequence[Tensor],
    kwargs: Kwargs,
) -> Any:
    """Runs a program; returns the output, or a tuple of it and the extra outputs."""
    for op, needed in program.prepared_ops:
        op.pre_fuser_forward(requires_grad=needed)
    if program.needs_backward:
        if torch.compiler.is_compiling():
            tensors = _each_once([input_, *parameters, *extra_inputs])
            return _Run.apply(program, kwargs, *tensors)  # type: ignore[no-untyped-call]
        if torch._C._are_functorch_transforms_active():
            return _Run.apply(program, kwargs, input_, *parameters, *extra_inputs)  # type: ignore[no-untyped-call]
        return _apply(program, kwargs, input_, *parameters, *extra_inputs)  # type: ignore[no-untyped-call]
    output, outputs = walk_forward(program, kwargs, input_, extra_inputs, None)
    return (output, *outputs) if outputs else output


def _each_once(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, with an alias for each that occurred before: Dynamo takes no tensor twice."""
    out: list[Tensor] = []
    for t in tensors:
        out.append(t.view_as(t) if any(t is earlier for earlier in out) else t)
    return out


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


class _Run(torch.autograd.Function):
    """Differentiates a whole run of operations at once, so that the passes may fuse differently."""

    @staticmethod
    def forward(
        func_ctx: Any, program: Program, kwargs: Kwargs, input_: Tensor, *tensors: Tensor
    ) -> Any:
        tape = Tape()
        extra_inputs = tensors[program.num_parameters :]
        output, outputs = walk_forward(program, kwargs, input_, extra_inputs, tape)
        if tape.saved or program.kept_parameters:
            func_ctx.save_for_backward(*tape.saved, *[tensors[n] for n in program.kept_parameters])
        func_ctx.forwarded = (program, tape.contexts)
        if torch.compiler.is_compiling():
            # Traced by torch 2.11, an output that an in-place operation returned, or that shares
            # memory with another one, gets the gradient of something else.
            output = output.view_as(output)
            outputs = [y.clone() if _OLD_DYNAMO else y.view_as(y) for y in outputs]
        elif output._is_view() and not any(_share_memory(output, t) for t in (input_, *tensors)):
            # A view of a tensor that is ours; autograd forbids changing it in place if it knows.
            output = output.detach()
        if not outputs:
            return output
        func_ctx.set_materialize_grads(False)
        func_ctx.output_like = (output.shape, output.dtype, output.device)
        return _distinct_outputs(func_ctx, program, output, outputs)

    @staticmethod
    def backward(func_ctx: Any, grad_output: Tensor | None, *grad_outputs: Tensor | None) -> Any:
        if grad_output is None:
            grad_output = _zeros(func_ctx.output_like)
        if torch.compiler.is_compiling():
            return (None, None, *_walk_backward(func_ctx, grad_output, grad_outputs, keep=True))
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if not torch.is_grad_enabled():
            grads = _walk_backward(func_ctx, grad_output, grad_outputs, keep)
        else:
            anchors = _what_gradients_depend_on(func_ctx, (grad_output, *grad_outputs))
            with torch.no_grad():
                grads = _walk_backward(func_ctx, grad_output, grad_outputs, keep)
            made = [g for g in grads if g is not None]
            guarded = iter(_NotTwice.apply(len(made), *made, *anchors))  # type: ignore[no-untyped-call]
            grads = [None if g is None else next(guarded) for g in grads]
        _separate(grads, (grad_output, *grad_outputs))
        return (None, None, *grads)


# What _Run.apply comes down to outside of torch.func; its Python wrapper looks at every argument.
_apply = super(torch.autograd.Function, _Run).apply


class _NotTwice(torch.autograd.Function):
    """Passes gradients through; raises when they are differentiated in turn."""

    @staticmethod
    def forward(func_ctx: Any, count: int, *tensors: Tensor) -> Any:
        return tuple(grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def backward(func_ctx: Any, *grads: Tensor) -> Any:
        raise DoubleBackwardError(_ONLY_ONCE)


_ONLY_ONCE = explain(
    "A sequence of fused operations can be differentiated only once",
    received="a second differentiation of its gradient (create_graph=True)",
    remedy="Use the operations' reference(), or torch.nn, where second derivatives are needed",
)


def _what_gradients_depend_on(func_ctx: Any, received: Sequence[Tensor | None]) -> list[Tensor]:
    """Tensors through which a second differentiation would go, so that it is noticed.

    Raises:
        DoubleBackwardError: one of them cannot be named, so that it would go unnoticed.
    """
    saved = [t for t in func_ctx.saved_tensors if t is not None]
    anchors = [t for t in (*received, *saved) if t is not None and t.requires_grad]
    for node, number in func_ctx.next_functions:
        if node is None or not saved:
            continue
        if hasattr(node, "variable"):
            anchors.append(node.variable)
        elif not any(t.grad_fn is node and t.output_nr == number for t in saved):
            raise DoubleBackwardError(_ONLY_ONCE)
    return anchors


def _distinct_outputs(
    func_ctx: Any, program: Program, output: Tensor, outputs: list[Tensor]
) -> tuple[Tensor, ...]:
    """Gives every output a tensor of its own: autograd attaches one history to each."""
    results = [output]
    for y in outputs:
        results.append(y.view_as(y) if any(y is earlier for earlier in results) else y)
    if program.without_grad:
        func_ctx.mark_non_differentiable(*[results[1 + n] for n in program.without_grad])
    return tuple(results)


def _zeros(like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


class _RevivedContext(OperationContext):
    """The context of an operation in backward: what forward left, and the tensors it saved.

    Values that an operation keeps as attributes are looked up in the context of forward, which is
    not written to, so that a second backward finds the same.
    """

    kept: OperationContext

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Backward fusions written for te.ops also read what its own forwards leave.
            if name in _LEFT_BY_TE_OPS and not hasattr(self.kept, name):
                return _LEFT_BY_TE_OPS[name](self)
            return getattr(self.kept, name)


_LEFT_BY_TE_OPS: dict[str, Callable[[OperationContext], Any]] = {
    "dtype": lambda ctx: next((t.dtype for t in ctx.saved_tensors if t is not None), None),
    "input_requires_grad": lambda ctx: ctx.needs.input,
    "weight_requires_grad": lambda ctx: any(ctx.needs.parameters),
    "with_quantized_compute": lambda ctx: False,
    **{
        f"{name}_quantizer": lambda ctx: None
        for name in ("input", "weight", "grad_output", "grad_input", "prev_op_grad_output")
    },
}


def _revive(
    kept: OperationContext, saved: list[Tensor | None], parameters: tuple[int, int] | None
) -> OperationContext:
    """The context of one operation for its backward.

    What it takes leaves ``saved``, so that it is freed as soon as the operation is done with it.

    Args:
        parameters: where ``saved`` holds the operation's parameters, if its backward reads them.
    """
    if kept.span is None and parameters is None:
        return kept
    ctx = _RevivedContext()
    ctx.kept = kept
    ctx.requires_grad = kept.requires_grad
    ctx.needs = kept.needs
    ctx.output_like = kept.output_like
    if kept.span is not None:
        start, stop = kept.span
        ctx.saved_tensors = tuple(saved[start:stop])
        saved[start:stop] = [None] * (stop - start)
    if parameters is not None:
        start, stop = parameters
        ctx.parameters = tuple(saved[start:stop])
    return ctx


def _walk_backward(
    func_ctx: Any, dx: Tensor | None, grad_outputs: Sequence[Tensor | None], keep: bool
) -> list[Tensor | None]:
    """Runs the backward steps; returns the gradients of input, parameters and extra inputs."""
    saved: list[Tensor | None] = list(func_ctx.saved_tensors)
    program, contexts = func_ctx.forwarded
    if saved and not keep and _CAN_CLEAR:
        func_ctx.maybe_clear_saved_tensors()
        func_ctx.forwarded = None
    base = len(saved) - len(program.kept_parameters)
    grads_of: dict[Slot, Tensor] = {}
    for slot, grad in zip(program.outputs, grad_outputs):
        if grad is not None:
            grads_of[slot] = grad
    param_grads: list[Tensor | None] = [None] * program.num_parameters
    extra_grads: list[Tensor | None] = [None] * program.num_extra_inputs

    for op, index, (start, stop), reads, constant, general in program.backward:
        if general is not None:
            ctxs = [
                _revive(contexts[i], saved, r and (base + r[0], base + r[1]))
                for i, r in zip(general.indices, general.reads)
            ]
            dx = _general_backward(
                program, op, general, ctxs, dx, grads_of, param_grads, extra_grads
            )
            ctxs = []
            continue
        ctx = constant or contexts[index]
        if constant is None and (ctx.span is not None or reads is not None):
            ctx = _revive(ctx, saved, reads and (base + reads[0], base + reads[1]))
        if dx is None:
            continue
        dx, grads = op.op_backward(ctx, dx)
        ctx = None
        if type(grads) is tuple and len(grads) == stop - start:
            param_grads[start:stop] = grads
        else:
            _place_parameter_grads(program, index, grads, param_grads)
    if not program.input_needs_grad:
        dx = None
    return [dx, *param_grads, *extra_grads]


def _place_parameter_grads(
    program: Program, index: int, grads: Any, param_grads: list[Tensor | None]
) -> None:
    start, stop = program.spans[index]
    if grads is None:
        return
    grads = tuple(grads)
    if len(grads) != stop - start:
        raise ParameterGradientCountError(
            explain(
                f"Expected op {index} to generate {stop - start} param grads, but got {len(grads)}",
                where=f"op {index} ({type(program.plan.basic_ops[index]).__name__})",
                remedy="Return one gradient or None per parameter, in registration order",
            )
        )
    if grads:
        param_grads[start:stop] = grads


def _general_backward(
    program: Program,
    op: Any,
    general: GeneralBackward,
    ctxs: list[OperationContext],
    dx: Tensor | None,
    grads_of: dict[Slot, Tensor],
    param_grads: list[Tensor | None],
    extra_grads: list[Tensor | None],
) -> Tensor | None:
    grad_extra_outputs = [
        [grads_of.pop(Slot(i, s), None) for s in range(count)]
        for i, count in zip(general.indices, general.num_extra_outputs)
    ]
    if dx is None:
        # The operations after this one pass no gradient back, so that of its output is zero.
        given = [g for gs in grad_extra_outputs for g in gs if g is not None]
        if not given:
            return None
        like = ctxs[-1].output_like or (given[0].shape, given[0].dtype, given[0].device)
        dx = _zeros(like)
    dx, params, extras = op.fuser_backward(ctxs, dx, basic_op_grad_extra_outputs=grad_extra_outputs)
    if len(params) != len(general.indices) or len(extras) != len(general.indices):
        raise ParameterGradientCountError(
            explain(
                f"Expected gradients for {len(general.indices)} basic operations, but got "
                f"{len(params)} lists of param grads and {len(extras)} of extra-input grads",
                where=general.name,
            )
        )
    for i, grads, dextras, targets in zip(general.indices, params, extras, general.targets):
        _place_parameter_grads(program, i, grads, param_grads)
        if dextras is None:
            continue
        if len(dextras) != len(targets):
            raise ExtraInputGradientCountError(
                explain(
                    f"Expected op {i} to generate grads for {len(targets)} extra inputs, "
                    f"but got {len(dextras)}",
                    where=general.name,
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
    return dx


def _separate(grads: list[Tensor | None], received: Sequence[Tensor | None]) -> None:
    """Copies a gradient that shares memory with another one, or with one that was received.

    Autograd shares one tensor object between several owners safely, by its reference count; two
    objects over the same memory it cannot tell apart, and accumulates in place into both.
    """
    views = [n for n, grad in enumerate(grads) if grad is not None and grad._is_view()]
    for n in views:
        grad = grads[n]
        if grad is not None:
            others = [*received, *grads[:n], *grads[n + 1 :]]
            if any(other is not None and _overlap(grad, other) for other in others):
                grads[n] = grad.clone()


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not _share_memory(a, b):
        return False
    (a_start, a_stop), (b_start, b_stop) = _extent(a), _extent(b)
    return a_start < b_stop and b_start < a_stop


def _extent(t: Tensor) -> tuple[int, int]:
    """First and one past the last byte of its storage that ``t`` covers."""
    start = int(t.storage_offset()) * t.itemsize
    if not t.numel():
        return start, start
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(t.shape, t.stride()))
    return start, start + (last + 1) * t.itemsize

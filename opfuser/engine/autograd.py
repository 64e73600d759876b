"""Execution of a plan: one autograd.Function for a whole group of operations.

A ``Program`` is all that does not change between calls. What ``torch.compile`` traces is executed
by ``traced``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .. import torch_internals as internals
from ..core.buffer_reuse import any_overlap, is_batched, overlap, shares_nothing
from ..core.change_tracking import active_calls
from ..errors import DoubleBackwardError, NotSupportedError, explain
from ..events.kinds import BytesSaved
from ..events.telling import emit
from ..torch_internals import memory_of
from .passes import (
    Kwargs,
    Tape,
    backward_of_eager,
    execute_backward,
    execute_forward,
    run_recorded_backward,
    tell_step,
)
from .program import Program
from .recorded.functions import NotRecordableError, tensors_in
from .recorded.guards import keywords_of
from .recorded.recordable import refuse_tensors
from .recorded.specialized import Specialization
from .steps import zeros

__all__ = ["Kwargs", "batched_like", "differentiate", "execute_eagerly", "returned", "separate"]


def execute_eagerly(
    program: Program,
    input_: Tensor,
    parameters: Sequence[Tensor],
    extra_inputs: Sequence[Tensor],
    kwargs: Kwargs,
) -> Any:
    """The output of a program, or a tuple of it and the extra outputs.

    By what was recorded of a call like this one, if anything was.
    """
    recorded = program.specializations
    if recorded.found and (keywords := keywords_of(kwargs)) is not None:
        given, caches, facts = keywords
        kept = (*given, *recorded.kept()) if given or recorded.keeps else ()
        found = recorded.find(input_, parameters, extra_inputs, kept, facts)
        if found is not None and program.needs_backward:
            others = kept, caches
            return _apply_recorded(program, found, others, input_, *parameters, *extra_inputs)
        if found is not None:
            try:
                output, outputs, _ = found.forward(input_, parameters, extra_inputs, kept, *caches)
            except Exception as error:
                tell_step(error, program, "forward")
                raise
            return (output, *outputs) if outputs else output
    for op, needed in program.prepared_ops:
        op.pre_fuser_forward(requires_grad=needed)
    active_calls.depth += 1
    try:
        functorch = internals.transforms_active()
        if program.needs_backward:
            apply: Any = _SequenceFunction.apply if functorch else _apply
            return apply(program, kwargs, input_, *parameters, *extra_inputs)
        if functorch:
            input_ = batched_like(input_, [*parameters, *extra_inputs], kwargs)
        output, outputs = execute_forward(
            program, kwargs, input_, extra_inputs, None, None if functorch else parameters
        )
        # detach() would drop the tangents of forward mode.
        if (
            not functorch
            and internals.is_view(output)
            and not torch.is_grad_enabled()
            and unpack_dual(output).tangent is None
        ):
            output = _without_base(output, (input_, *extra_inputs))
        return (output, *outputs) if outputs else output
    finally:
        active_calls.depth -= 1


def _without_base(output: Tensor, given: Sequence[Tensor]) -> Tensor:
    """An output that is a view, as none unless it shares memory with a tensor in ``given``.

    A view of an intermediate result autograd would not let the caller change, and ``fully_shard``
    warns of a unit that returns one.
    """
    if shares_nothing(output):  # the usual case, without a look at each of those
        return output.detach()
    memory = output.untyped_storage().data_ptr()
    shared = any(t.untyped_storage().data_ptr() == memory for t in given)
    return output if shared else output.detach()


def _without_graphs(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Outputs without the graph that a user's operation made of them, and may differentiate itself.

    Of a tensor that a Function returns, autograd replaces the history.
    """
    return [y if y.grad_fn is None or any(y is t for t in given) else y.detach() for y in outputs]


def batched_like(x: Tensor, others: Sequence[Tensor], kwargs: Kwargs) -> Tensor:
    """``x`` with the batch dimensions that ``torch.vmap`` gave to any other tensor of a call.

    Operations write into tensors that they allocate like their input. vmap refuses that where the
    input is not batched, but the values written are.
    """
    others = [*others, *tensors_in(kwargs)]
    zero = x.new_zeros(())
    for other in others:
        zero = zero + other.new_zeros((), dtype=x.dtype, device=x.device)
    return x + zero if others else x


def refuse_gradients_of(kwargs: Kwargs) -> None:
    """Raises NotSupportedError for keywords that require grad: the call is differentiated."""
    for own in kwargs or ():
        for name, value in own.items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise NotSupportedError.explained(
                    "Keywords of operations are constants: they get no gradient",
                    received=f"{name}, which requires grad",
                    remedy="Pass it detached; what is trained is a parameter or an extra input",
                )


class _SequenceFunction(torch.autograd.Function):
    """Differentiates a group of operations at once, so that the passes may fuse differently."""

    @staticmethod
    def forward(
        func_ctx: Any, program: Program, kwargs: Kwargs, input_: Tensor, *tensors: Tensor
    ) -> Any:
        tape = Tape()
        extra_inputs = tensors[program.num_parameters :]
        parameters = tensors[: program.num_parameters]
        output, outputs = execute_forward(program, kwargs, input_, extra_inputs, tape, parameters)
        refuse_gradients_of(kwargs)  # an operation may have said so itself
        if tape.verification is not None:
            tape.verification.note(tensors)
        marked, hooked = False, False
        if tape.saved or program.kept_parameters:
            marked, hooked = _saved_tensors_hooks()
            mark = [torch.empty(0, program.layout())] if marked else ()
            func_ctx.save_for_backward(*mark, *tape.saved, *program.kept(tensors))
        func_ctx.forwarded = (
            program,
            tape.contexts,
            marked,
            hooked,
            tape.verification,
            tape.special,
        )
        if BytesSaved.wanted:
            emit(_bytes_saved(program, tape.saved, parameters, marked))
        if internals.is_view(output):
            output = _without_base(output, (input_, *tensors))
        if program.verified is not None:
            output, *outputs = _without_graphs((output, *outputs), (input_, *tensors))
        return returned(func_ctx, program, output, outputs)

    @staticmethod
    def backward(func_ctx: Any, grad_output: Tensor | None, *grad_outputs: Tensor | None) -> Any:
        if grad_output is None:
            grad_output = zeros(func_ctx.output_like)
        return _SequenceFunction._backward(func_ctx, grad_output, grad_outputs)

    @staticmethod
    def _backward(func_ctx: Any, grad_output: Tensor, grad_outputs: Sequence[Tensor | None]) -> Any:
        if torch.compiler.is_compiling():  # compiled autograd does, of calls that were not
            return (None, None, *backward_of_eager(func_ctx, grad_output, grad_outputs))

        def compute(keep: bool) -> list[Tensor | None]:
            grads = execute_backward(func_ctx, grad_output, grad_outputs, keep)
            separate(grads, (grad_output, *grad_outputs))
            return grads

        return (None, None, *differentiate(func_ctx, (grad_output, *grad_outputs), compute))


class _RecordedFunction(torch.autograd.Function):
    """The same by functions that were recorded of a call like this one."""

    @staticmethod
    def forward(
        func_ctx: Any,
        program: Program,
        found: Specialization,
        others: tuple[Sequence[Tensor], Sequence[Any]],
        input_: Tensor,
        *tensors: Tensor,
    ) -> Any:
        count = program.num_parameters
        parameters, extra_inputs = tensors[:count], tensors[count:]
        kept, caches = others
        try:
            output, outputs, saved = found.forward(input_, parameters, extra_inputs, kept, *caches)
        except Exception as error:
            tell_step(error, program, "forward")
            raise
        if program.kept_parameters:
            saved += program.kept(parameters)
        marked = hooked = False
        if saved and internals.saved_tensors_hooks(False) is not None:
            marked, hooked = _saved_tensors_hooks()
            if marked:
                saved.insert(0, torch.empty(0, program.layout()))
        func_ctx.to_save = tuple(saved)
        func_ctx.forwarded = program, found.contexts, marked, hooked, None, found
        return returned(func_ctx, program, output, outputs) if outputs else output

    @staticmethod
    def backward(func_ctx: Any, grad_output: Tensor | None, *grad_outputs: Tensor | None) -> Any:
        if grad_output is None:
            grad_output = zeros(func_ctx.output_like)
        if func_ctx.forwarded is None:
            func_ctx.saved_tensors  # noqa: B018 - raises: this graph is gone
        program, _, marked, hooked, _, special = func_ctx.forwarded
        if marked or hooked or torch.is_grad_enabled() or internals.is_profiled():
            return None, *_SequenceFunction._backward(func_ctx, grad_output, grad_outputs)
        keep = internals.keeps_graph()
        recorded = program.specializations
        kept = recorded.kept() if recorded.keeps else ()
        saved = list(func_ctx.saved_tensors)
        found = recorded.find_backward(special, grad_output, grad_outputs, saved, kept, keep)
        if found is None:
            del saved  # which would count as a reference to what is in it
            return None, *_SequenceFunction._backward(func_ctx, grad_output, grad_outputs)
        if saved and not keep and internals.CAN_CLEAR:
            func_ctx.maybe_clear_saved_tensors()
        grads = run_recorded_backward(
            program, special, found, grad_output, grad_outputs, saved, kept
        )
        if found.shares:
            separate(grads, (grad_output, *grad_outputs))
        return None, None, None, *grads


def differentiate(
    func_ctx: Any, received: Sequence[Tensor | None], compute: Callable[[bool], list[Tensor | None]]
) -> list[Tensor | None]:
    """The gradients that ``compute`` returns, which raise when they are differentiated.

    Args:
        func_ctx: of the autograd.Function whose backward runs.
        received: gradients of its outputs.
        compute: called with whether another backward pass may follow (``retain_graph``).

    Raises:
        DoubleBackwardError: it is unknown whether they will be (``create_graph``).
        NotSupportedError: several gradients were received at once.
    """
    keep = internals.keeps_graph()
    try:
        if not torch.is_grad_enabled():
            return compute(keep)
        func_ctx.create_graph = True  # for operations, which run with grad mode off
        anchors = _what_gradients_depend_on(func_ctx, received)
        with torch.no_grad():
            grads = compute(keep)
        made = [g for g in grads if g is not None]
        guarded = iter(_NotTwice.apply(len(made), *made, *anchors))
        return [None if g is None else next(guarded) for g in grads]
    except RuntimeError as error:
        if any(map(is_batched, received)):
            raise NotSupportedError(_NOT_BATCHED) from error
        raise


_NOT_BATCHED = explain(
    "A sequence is differentiated for one gradient of its output at a time",
    received="several at once (is_grads_batched=True, vectorize=True or torch.vmap), for which an "
    "operation has no backward",
    remedy="Call torch.autograd.grad for each of them, with retain_graph=True",
)


# Without the Python wrapper of torch before 2.14, which inspects every argument for torch.func.
_apply = super(torch.autograd.Function, _SequenceFunction).apply
_apply_recorded: Callable[..., Any] = super(torch.autograd.Function, _RecordedFunction).apply


def _bytes_saved(
    program: Program,
    saved: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    checkpointed: bool,
) -> BytesSaved:
    (number,) = program.plan.numbers
    own = {memory_of(p) for p in parameters if p.layout is torch.strided}
    # A sparse tensor has no memory of its own, but pieces that have.
    kept = [t for t in saved if t is not None and t.layout is torch.strided]
    sizes = {memory_of(t): t.untyped_storage().nbytes() for t in kept}
    size = sum(n for memory, n in sizes.items() if memory not in own)
    count = sum(memory_of(t) not in own for t in kept)
    return BytesSaved(number, size, count, checkpointed)


def _saved_tensors_hooks() -> tuple[bool, bool]:
    """Whether a checkpoint's hooks take what is saved, and whether a caller's hooks do.

    A checkpoint drops the saved tensors and recomputes them in backward. If fusions were switched
    meanwhile, the recomputation follows another plan and may save other tensors of the same shapes.
    The checkpoint compares shapes: an empty tensor whose shape identifies the layout of the saved
    tensors makes it raise. What it recomputes is ours; what a caller's hooks return is theirs.
    """
    hooks = internals.saved_tensors_hooks(False)
    if hooks is None:
        return False, False
    checkpoint = getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return checkpoint, not checkpoint


class _NotTwice(torch.autograd.Function):
    """The identity of gradients, which raises when they are differentiated."""

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
    """The tensors through which a second differentiation would pass, so that it is noticed.

    Raises:
        DoubleBackwardError: one of them is unknown, so that it would go unnoticed.
    """
    saved = [t for t in func_ctx.saved_tensors if t is not None]
    anchors = [t for t in (*received, *saved) if t is not None and t.requires_grad]
    depends = bool(saved) or _keep_tensors(func_ctx)
    for node, number in func_ctx.next_functions:
        if node is None or not depends:
            continue
        if hasattr(node, "variable"):
            anchors.append(node.variable)
        elif not any(t.grad_fn is node and t.output_nr == number for t in saved):
            raise DoubleBackwardError(_ONLY_ONCE)
    return anchors


def _keep_tensors(func_ctx: Any) -> bool:
    """Whether contexts of a call have tensors besides what was saved."""
    try:
        refuse_tensors(func_ctx.forwarded[1])
    except NotRecordableError:
        return True
    return False


def returned(func_ctx: Any, program: Program, output: Tensor, outputs: Sequence[Tensor]) -> Any:
    """What the forward of an autograd.Function returns: the output, or a tuple of all outputs.

    They are distinct tensors, as autograd attaches one history to each.
    """
    if not outputs:
        return output
    func_ctx.set_materialize_grads(False)
    func_ctx.output_like = (output.shape, output.dtype, output.device)
    results = [output]
    for n, y in enumerate(outputs):
        distinct = y
        if any(y is earlier for earlier in results):
            # A view of what has a history would have one, too, without a node of its own.
            distinct = y.detach() if n in program.without_grad else y.view_as(y)
        results.append(distinct)
    if program.without_grad:
        func_ctx.mark_non_differentiable(*[results[1 + n] for n in program.without_grad])
    return tuple(results)


def separate(grads: list[Tensor | None], received: Sequence[Tensor | None]) -> None:
    """Copies each gradient that shares memory with another one, or with a received one.

    Autograd shares one tensor object between several owners safely, by its reference count. Of two
    objects over the same memory it does not know, and accumulates in place into both.
    """
    views = [n for n, grad in enumerate(grads) if grad is not None and internals.is_view(grad)]
    if not views:
        return
    if any(map(is_batched, received)):  # batched tensors have no address
        for n in views:
            grads[n] = grads[n].clone()  # type: ignore[union-attr]
        return
    present = [t for t in (*received, *grads) if t is not None]
    memory = [t.untyped_storage().data_ptr() for t in present]
    if len(set(memory)) == len(memory) or not any_overlap(present, memory):
        return
    for n in views:
        grad = grads[n]
        if grad is not None:
            others = [*received, *grads[:n], *grads[n + 1 :]]
            if any(other is not None and overlap(grad, other) for other in others):
                grads[n] = grad.clone()

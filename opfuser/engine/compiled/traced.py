"""Execution of a program for torch.compile and torch.export to trace.

No call is recorded, verified or replayed here, and no memory is used again: what makes eager calls
fast, or checks them, is in ``autograd`` and ``passes``. No attribute of a tensor is read, and
backward changes no context of forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime.tracing import exporting, transforms_active
from ...torch_internals import (
    VERSION,
    FunctionalTensorMode,
    compiling,
    dispatch_functionalize,
    is_view,
)
from ..autograd import batched_like, execute_eagerly, refuse_gradients_of, returned
from ..passes import Kwargs, Tape, traced_forward
from ..program import Program
from ..steps import zeros

_OLD_DYNAMO = VERSION < (2, 12)


def execute(
    program: Program,
    input_: Tensor,
    parameters: Sequence[Tensor],
    extra_inputs: Sequence[Tensor],
    kwargs: Kwargs,
) -> Any:
    """The output of a program, or a tuple of it and the extra outputs."""
    # Where Dynamo has broken the graph on the way here, this is left to eager mode.
    if not torch.compiler.is_compiling():
        return execute_eagerly(program, input_, parameters, extra_inputs, kwargs)
    for op, needed in program.prepared_ops:
        op.pre_fuser_forward(requires_grad=needed)
    by_dynamo = torch.compiler.is_dynamo_compiling()
    if exporting() and not by_dynamo:
        return _execute_exported(program, input_, extra_inputs, kwargs)
    if not program.needs_backward:
        if transforms_active():
            input_ = batched_like(input_, [*parameters, *extra_inputs], kwargs)
        output, outputs = traced_forward(program, kwargs, input_, extra_inputs, None)
        return (output, *outputs) if outputs else output
    refuse_gradients_of(kwargs)
    if not by_dynamo:
        return _InGraphFunction.apply(program, kwargs, input_, *parameters, *extra_inputs)
    if _OLD_DYNAMO and input_.dim() and input_.is_floating_point():
        # The tracer of torch 2.11 fails where a later operation requires a size that it
        # treats as variable to be that of a parameter. Reading the size fixes it here.
        range(input_.shape[-1])
    tensors = _each_once([input_, *parameters, *extra_inputs])
    return _DynamoFunction.apply(program, kwargs, *tensors)


def _execute_exported(
    program: Program, input_: Tensor, extra_inputs: Sequence[Tensor], kwargs: Kwargs
) -> Any:
    """As :func:`execute` of a program that needs no backward, while torch.export traces.

    An exported program holds ATen operations of the forward pass alone, and torch differentiates
    them when it runs. So nothing may be detached, as an autograd.Function does, and no result may
    be overwritten, as plain torch does here to save memory: its gradient may have to be computed of
    it. What operations write in place becomes operations that return their results.
    """

    def forward(x: Tensor, *extras: Tensor, kwargs: Kwargs) -> Any:
        output, outputs = traced_forward(program, kwargs, x, extras, None)
        return (output, *outputs) if outputs else output

    # Views are recorded for the strides that are traced; those of later inputs may be others.
    inputs = [t.clone(memory_format=torch.contiguous_format) for t in (input_, *extra_inputs)]
    mode = FunctionalTensorMode(pre_dispatch=True, export=True)
    return dispatch_functionalize(forward, mode)(*inputs, kwargs=kwargs)


def _each_once(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, repeated ones as aliases: Dynamo accepts no tensor twice."""
    out: list[Tensor] = []
    for t in tensors:
        out.append(t.view_as(t) if any(t is earlier for earlier in out) else t)
    return out


class _DynamoFunction(torch.autograd.Function):
    """A group of operations and its gradient, as Dynamo interprets them."""

    @staticmethod
    def forward(
        func_ctx: Any, program: Program, kwargs: Kwargs, input_: Tensor, *tensors: Tensor
    ) -> Any:
        output, outputs = _forward(func_ctx, program, kwargs, input_, tensors)
        # In a trace of torch 2.11, an output that an in-place operation returned, or that
        # shares memory with another one, gets a wrong gradient.
        output = output.view_as(output)
        outputs = [y.clone() if _OLD_DYNAMO else y.view_as(y) for y in outputs]
        return returned(func_ctx, program, output, outputs)

    @staticmethod
    def backward(func_ctx: Any, grad_output: Tensor | None, *grad_outputs: Tensor | None) -> Any:
        return _backward(func_ctx, grad_output, grad_outputs)


class _InGraphFunction(torch.autograd.Function):
    """The same for AOTAutograd, which traces backward when ``execute`` has returned."""

    @staticmethod
    def forward(
        func_ctx: Any, program: Program, kwargs: Kwargs, input_: Tensor, *tensors: Tensor
    ) -> Any:
        output, outputs = _forward(func_ctx, program, kwargs, input_, tensors)
        # What is traced has no memory, and is functional in any case.
        output = output.detach() if is_view(output) else output
        return returned(func_ctx, program, output, outputs)

    @staticmethod
    def backward(func_ctx: Any, grad_output: Tensor | None, *grad_outputs: Tensor | None) -> Any:
        with compiling():
            return _backward(func_ctx, grad_output, grad_outputs)


def _forward(
    func_ctx: Any, program: Program, kwargs: Kwargs, input_: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    tape = Tape()
    extra_inputs = tensors[program.num_parameters :]
    output, outputs = traced_forward(program, kwargs, input_, extra_inputs, tape)
    if tape.saved or program.kept_parameters:
        func_ctx.save_for_backward(*tape.saved, *program.kept(tensors))
    func_ctx.forwarded = program, tape.contexts
    return output, outputs


def _backward(
    func_ctx: Any, grad_output: Tensor | None, grad_outputs: Sequence[Tensor | None]
) -> Any:
    program, contexts = func_ctx.forwarded
    if grad_output is None:
        grad_output = zeros(func_ctx.output_like)
    saved: list[Tensor | None] = list(func_ctx.saved_tensors)
    backward = program.traced("backward")
    return None, None, *backward(grad_output, grad_outputs, contexts, saved, None)

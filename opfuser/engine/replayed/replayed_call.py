"""A call that replays: the autograd.Function around a recorded forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..autograd import differentiate, returned
from ..steps import zeros
from .captured import Flight


def replayed(
    flight: Flight, input_: Tensor, parameters: Sequence[Tensor], extra_inputs: Sequence[Tensor]
) -> Any:
    """The output of a call, or a tuple of it and the extra outputs."""
    captured = flight.captured
    if captured.program.needs_backward:
        return _apply(flight, input_, *parameters, *extra_inputs)
    with torch.no_grad():
        results = captured.forward((input_, *extra_inputs))
    return tuple(results) if len(results) > 1 else results[0]


class _ReplayedFunction(torch.autograd.Function):
    """Replays a recorded forward pass, and later the backward pass."""

    @staticmethod
    def forward(func_ctx: Any, flight: Flight, input_: Tensor, *tensors: Tensor) -> Any:
        captured = flight.captured
        program = captured.program
        extra_inputs = tensors[program.num_parameters :]
        results = captured.forward((input_, *extra_inputs))
        # The inputs were copied. They are saved for a second differentiation to be noticed, and so
        # that there always is something that tells a second backward pass.
        inputs = [t for t in (input_, *extra_inputs) if t.requires_grad]
        func_ctx.save_for_backward(*captured.saves(tensors), *(inputs or [input_]))
        func_ctx.flight = flight
        return returned(func_ctx, program, results[0], results[1:])

    @staticmethod
    def backward(func_ctx: Any, grad_output: Tensor | None, *grad_outputs: Tensor | None) -> Any:
        flight: Flight = func_ctx.flight
        captured = flight.captured
        # Raises if this was done before, or if a parameter has changed since.
        read = func_ctx.saved_tensors[: captured.num_read]
        grad = zeros(func_ctx.output_like) if grad_output is None else grad_output

        def compute(keep: bool) -> list[Tensor | None]:
            grads = captured.backward(flight, read, grad, grad_outputs)
            if not keep:
                captured.flight = None
            return grads

        return (None, *differentiate(func_ctx, (grad, *grad_outputs), compute))


# As in engine.autograd, without the wrapper in Python.
_apply = super(torch.autograd.Function, _ReplayedFunction).apply

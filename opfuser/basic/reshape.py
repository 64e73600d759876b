"""Change of shape."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError, InputError
from ..op import BasicOperation, OperationContext, OperationGrads


class Reshape(BasicOperation):
    """Reshapes its input, as ``torch.reshape``: a view where the strides allow it.

    Any dtype; the output has that of the input.

    Args:
        shape: the sizes of the output, or its only size. One of them may be -1, and is then
            inferred. With zero elements, it can be inferred only if no other size is 0.

    Raises:
        ArgumentError: if a size is below -1, or more than one is -1.
        ArgumentTypeError: if a size is not an integer.
        InputError: in forward, if the input cannot be reshaped to ``shape``.
    """

    class Settings(NamedTuple):
        shape: tuple[int, ...]

    def __init__(self, shape: Iterable[int] | int) -> None:
        super().__init__()
        self.shape = shape
        (self.shape,) = self.make_settings()

    def make_settings(self) -> Reshape.Settings:
        shape = self.shape
        sizes = shape if isinstance(shape, Iterable) else (shape,)
        try:
            shape = tuple([index(size) for size in sizes])
        except TypeError as error:
            raise ArgumentTypeError.explained(
                "The shape must be an integer or an iterable of integers",
                where="Reshape",
                received=f"shape={shape!r}",
            ) from error
        if min(shape, default=0) < -1 or shape.count(-1) > 1:
            raise ArgumentError.explained(
                "Sizes must be non-negative, except for at most one -1",
                where="Reshape",
                received=f"shape={shape}",
            )
        return self.Settings(shape)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        if ctx.requires_grad:
            ctx.input_shape = input_.shape
        return self._reshape(input_, *self.frozen_settings(ctx))

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        return (grad_output.reshape(ctx.input_shape) if ctx.needs.input else None), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self._reshape(input_, *self.make_settings())

    def _reshape(self, input_: Tensor, shape: tuple[int, ...]) -> Tensor:
        try:
            return input_.reshape(shape)
        except RuntimeError as error:
            raise InputError.explained(
                "The input must have as many elements as the shape asks for",
                where="Reshape",
                received=f"input {tuple(input_.shape)} for shape={shape}",
            ) from error

"""Multiplication by a constant."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..op import BasicOperation, OperationContext, OperationGrads
from ._numbers import real_number


class ConstantScale(BasicOperation):
    """Multiplies by a constant: ``y = scale * x``, ``dx = scale * dy``.

    Any shape; the output has the dtype of a floating-point input.

    Args:
        scale: the constant, a real Python number.

    Raises:
        ArgumentTypeError: if ``scale`` is not a number; a tensor would get no gradient.
    """

    class Settings(NamedTuple):
        scale: float

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale: float = scale
        (self.scale,) = self.make_settings()

    def make_settings(self) -> ConstantScale.Settings:
        remedy = "Multiply by anything else outside the sequence"
        return self.Settings(real_number(self.scale, "The scale", "ConstantScale", remedy))

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        (scale,) = self.frozen_settings(ctx)
        return input_.mul(scale)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        if not ctx.needs.input:
            return None, ()
        (scale,) = self.frozen_settings(ctx)
        return grad_output.mul(scale), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.scale * input_

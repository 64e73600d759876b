"""Multiplication by a constant."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..errors import ArgumentTypeError, explain
from ..op import BasicOperation, OperationContext

__all__ = ["ConstantScale"]


class ConstantScale(BasicOperation):
    """Multiplies by a constant: ``y = scale * x``, ``dx = scale * dy``, in the input's dtype.

    Args:
        scale: the constant, a Python number.

    Raises:
        ArgumentTypeError: if ``scale`` is a tensor, which would get no gradient.
    """

    forward_leaves_nothing: ClassVar[bool] = True

    def __init__(self, scale: float) -> None:
        super().__init__()
        if isinstance(scale, Tensor):
            raise ArgumentTypeError(
                explain(
                    "The scale must be a Python number",
                    where="ConstantScale",
                    received="a tensor",
                    remedy="Multiply by a tensor outside the sequence",
                )
            )
        self.scale: float = scale

    def op_forward(  # type: ignore[override]  # takes no keywords of its own
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        return input_ * self.scale

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[()]]:
        return (grad_output * self.scale if ctx.needs.input else None), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.scale * input_

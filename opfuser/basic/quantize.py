"""The place in a sequence where a quantisation recipe would convert the tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..op import BasicOperation, OperationContext

__all__ = ["Quantize"]


class Quantize(BasicOperation):
    """Marks where a tensor is quantised; for now the identity.

    No tensor between operations is quantised yet, whatever the recipe: ``y = x`` and ``dx = dy``.

    Args:
        forward: whether the output is to be quantised.
        backward: whether the gradient of the input is to be quantised.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantize_forward = forward
        self.quantize_backward = backward

    def op_forward(  # type: ignore[override]  # takes no keywords of its own
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        return input_

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[()]]:
        return grad_output, ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_.clone()

"""The identity."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..op import BasicOperation, OperationContext, OperationGrads


class Identity(BasicOperation):
    """Returns its input, of any shape and dtype: ``y = x``. A placeholder in any sequence."""

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        return grad_output, ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_.clone()

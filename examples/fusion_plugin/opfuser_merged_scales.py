"""One multiplication for any number of ConstantScale operations in a row, in both passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opfuser import ConstantScale, FusedOperation, Fusion, OperationContext, Repeated


class MergedScales(FusedOperation):
    """y = (s1 · s2 · …) x.

    Args:
        scales: the operations that it replaces.
    """

    def __init__(self, scales: Sequence[ConstantScale]) -> None:
        super().__init__(scales)

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, list[tuple[()]]]:
        return input_ * self._factor(basic_op_ctxs), [()] * len(self.basic_ops)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor, list[tuple[()]], list[tuple[()]]]:
        nothing: list[tuple[()]] = [()] * len(self.basic_ops)
        return grad_output * self._factor(basic_op_ctxs), nothing, nothing

    @staticmethod
    def _factor(ctxs: Sequence[OperationContext]) -> float:
        """What forward multiplied by: the settings of the contexts do not change after it."""
        return math.prod(ctx.settings.scale for ctx in ctxs)


FUSION = Fusion(
    name="merged_scales",
    stage="joint",
    # Exact types: a subclass may compute something else.
    pattern=(Repeated("ConstantScale", lambda op: type(op) is ConstantScale, at_least=2),),
    build=MergedScales,
)

"""Input-gradient GEMM that accumulates onto a residual gradient."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .. import gemm
from ..basic.make_extra_output import MakeExtraOutput
from ..core.buffer_reuse import only_reference
from ..core.context import BackwardResult, Contexts, Extras
from ..core.fusion import Fusion
from ..op import FusedOperation
from ._linear import LINEARS, AnyLinear, backward_refusal, insist


class BackwardLinearAdd(FusedOperation):
    r"""Backward of MakeExtraOutput and BasicLinear: :math:`dx = g + dy\, W`, :math:`dW = dy^T x`.

    g is the gradient of the extra output, and counts as zero where none arrives. The GEMM adds to
    it in place where nobody else refers to it, whatever the operations' ``in_place`` says: A
    elements of traffic instead of 3A. Else it starts from a copy. Where the dtype of g is not the
    weight's, the sum is a pass of its own.

    Reads what BasicLinear saved. One rounding less than the separate operations.

    Kernel: ATen's ``addmm`` (beta = 1).

    Args:
        backward_add: the operation whose extra output is the residual.
        linear: the linear operation.

    Raises:
        NotSupportedError: the backward of ``linear`` exchanges data between ranks.
    """

    fuse_backward_ops: ClassVar[Fusion]

    def __init__(self, *, backward_add: MakeExtraOutput, linear: AnyLinear) -> None:
        insist(backward_refusal(linear), type(self).__name__)
        super().__init__((backward_add, linear))
        self._parts = backward_add, linear

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        _, linear = self._parts
        ctx = basic_op_ctxs[1]
        x = ctx.saved_tensors[0]
        ours = only_reference(basic_op_grad_extra_outputs[0])
        (g,) = basic_op_grad_extra_outputs[0]
        dx = None
        if ctx.needs.input:
            dx = gemm.dgrad(grad_output, linear.saved_weight(ctx), add=g, in_place=ours)
        return dx, [(), linear.weight_grads(grad_output, x, ctx)], [(), ()]


FUSION = Fusion(
    name="backward_linear_add",
    stage="backward",
    pattern=(MakeExtraOutput, LINEARS),
    refuses=lambda _, linear, env: backward_refusal(linear),
    build=lambda backward_add, linear: BackwardLinearAdd(backward_add=backward_add, linear=linear),
)
# A static method of te.ops, which code of users calls.
BackwardLinearAdd.fuse_backward_ops = FUSION

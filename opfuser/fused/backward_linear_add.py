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

    g is the gradient of the extra output; a missing one counts as zero. The GEMM adds to it in
    place if nothing else refers to it, regardless of ``in_place``: A elements of traffic instead of
    3A. Otherwise it starts from a copy. If the dtype of g differs from the weight's, the sum is a
    separate pass.

    Reads the tensors that BasicLinear saved. One rounding less than the separate operations.

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

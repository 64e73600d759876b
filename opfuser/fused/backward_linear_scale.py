"""Gradient GEMMs with a constant factor folded in."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .. import gemm
from ..basic.constant_scale import ConstantScale
from ..core.context import BackwardResult, Contexts, Extras
from ..core.fusion import Fusion
from ..kernels.scalar import cast
from ..op import FusedOperation
from ._linear import LINEARS, AnyLinear, backward_refusal, insist


class BackwardLinearScale(FusedOperation):
    r"""Backward of BasicLinear and ConstantScale: :math:`dx = s\, dy W`, :math:`dW = s\, dy^T x`.

    Reads what BasicLinear saved. For A elements of output 2A less traffic than the separate
    operations, no tensor for s·dy, and one rounding less.

    Kernel: ATen's ``addmm`` (beta = 0, alpha = s).

    Args:
        scale: the factor.
        linear: the linear operation, which comes first in forward.

    Raises:
        NotSupportedError: the backward of ``linear`` exchanges data between ranks.
    """

    fuse_backward_ops: ClassVar[Fusion]

    def __init__(self, *, scale: ConstantScale, linear: AnyLinear) -> None:
        insist(backward_refusal(linear), type(self).__name__)
        super().__init__((linear, scale))
        self._parts = linear, scale

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        linear, scale = self._parts
        ctx = basic_op_ctxs[0]
        x, *weight = ctx.saved_tensors
        needs_dx = ctx.needs.input
        (s,) = scale.frozen_settings(basic_op_ctxs[1])
        dy = cast(grad_output, weight[0].dtype if needs_dx else x.dtype)  # once for two GEMMs
        dx = gemm.dgrad(dy, linear.saved_weight(ctx), scale=s) if needs_dx else None
        return dx, [linear.weight_grads(dy, x, ctx, s), ()], [(), ()]


FUSION = Fusion(
    name="backward_linear_scale",
    stage="backward",
    pattern=(LINEARS, ConstantScale),
    refuses=lambda linear, _, env: backward_refusal(linear),
    build=lambda linear, scale: BackwardLinearScale(linear=linear, scale=scale),
)
# A static method of te.ops, which code of users calls.
BackwardLinearScale.fuse_backward_ops = FUSION

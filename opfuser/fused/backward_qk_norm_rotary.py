"""Backward of the norm and the rotary embedding of queries and keys."""

from __future__ import annotations

from torch import Tensor

from ..basic.qk_norm import QKNorm
from ..basic.rotary_embedding import RotaryEmbedding
from ..core.context import BackwardResult, Contexts, Extras
from ..core.fusion import Env, Fusion, Refusal
from ..op import FusedOperation
from ._linear import insist


class BackwardQKNormRotary(FusedOperation):
    r"""Backward of QKNorm and RotaryEmbedding: the gradient rotated back, then through the norm.

    Reads what the two save, and makes the gradients of both weights in the same pass. For A
    elements of packed queries, keys and values 3A of traffic instead of 5A: the gradient that was
    turned back is not stored. Kernel: ours; of ATen's none does either of the two.

    Args:
        qk_norm: the norm.
        rotary: the rotary embedding, of the same heads.

    Raises:
        NotSupportedError: their heads differ in number or size.
    """

    def __init__(self, *, qk_norm: QKNorm, rotary: RotaryEmbedding) -> None:
        insist(_refuses(qk_norm, rotary), type(self).__name__)
        super().__init__((qk_norm, rotary))
        self._parts = qk_norm, rotary

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        qk_norm, rotary = self._parts
        ctx, rotary_ctx = basic_op_ctxs
        (positions,) = rotary_ctx.saved_tensors
        settings = rotary.frozen_settings(rotary_ctx)
        rotation = rotary.rotation(grad_output, positions, settings)
        dx, grads = qk_norm.gradients(ctx, grad_output, rotation)
        return dx, [grads, ()], [(), ()]


def _refuses(qk_norm: QKNorm, rotary: RotaryEmbedding, *, env: Env | None = None) -> Refusal | None:
    if qk_norm.heads == rotary.heads:
        return None
    return Refusal("SHAPE", f"QKNorm has heads {qk_norm.heads}, RotaryEmbedding {rotary.heads}")


FUSION = Fusion(
    name="backward_qk_norm_rotary",
    stage="backward",
    pattern=(QKNorm, RotaryEmbedding),
    refuses=_refuses,
    build=lambda qk_norm, rotary: BackwardQKNormRotary(qk_norm=qk_norm, rotary=rotary),
)

"""Forward of the norm and the rotary embedding of queries and keys."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ..basic.qk_norm import QKNorm
from ..basic.rotary_embedding import RotaryEmbedding
from ..core.context import Contexts, ForwardArguments, ForwardResult
from ..core.fusion import Env, Fusion, Refusal
from ..op import FusedOperation, in_compute_dtype
from ._linear import insist


class ForwardQKNormRotary(FusedOperation):
    r"""Forward of QKNorm and RotaryEmbedding: :math:`y = R(\mathrm{norm}(x))`, rounded once.

    Saves what the two save. For A elements of packed queries, keys and values 2A of traffic instead
    of 4A: the normalised heads are not stored. Kernel: ours; of ATen's none does either of the two.

    Args:
        qk_norm: the norm.
        rotary: the rotary embedding, of the same heads.

    Raises:
        NotSupportedError: their heads differ in number or size.
        InputError: in forward, as in the operations that it replaces.
    """

    def __init__(self, *, qk_norm: QKNorm, rotary: RotaryEmbedding) -> None:
        insist(_refuses(qk_norm, rotary), type(self).__name__)
        super().__init__((qk_norm, rotary))
        self._parts = qk_norm, rotary

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        qk_norm, rotary = self._parts
        ctx, rotary_ctx = basic_op_ctxs
        kwargs = given["basic_op_kwargs"][1]
        settings = qk_norm.frozen_settings(ctx)
        how = rotary.settings_of_call(rotary_ctx, kwargs.get("length"))
        if settings[:2] != how[:2]:  # set during a call
            insist(_refuses(qk_norm, rotary), type(self).__name__)
        positions = rotary.given(kwargs.get("positions"), kwargs.get("tables"))
        qk_norm.check_input(input_, settings)
        x = in_compute_dtype(input_, qk_norm)
        rotary.check_input(x, positions, how)
        if rotary_ctx.requires_grad:
            rotary_ctx.save_for_backward(*rotary.Saved(positions))
        rotation = rotary.rotation(x, positions, how)
        return qk_norm.normalise(ctx, x, rotation), [(), ()]


def _refuses(qk_norm: QKNorm, rotary: RotaryEmbedding, *, env: Env | None = None) -> Refusal | None:
    if qk_norm.heads == rotary.heads:
        return None
    return Refusal("SHAPE", f"QKNorm has heads {qk_norm.heads}, RotaryEmbedding {rotary.heads}")


FUSION = Fusion(
    name="forward_qk_norm_rotary",
    stage="forward",
    pattern=(QKNorm, RotaryEmbedding),
    refuses=_refuses,
    build=lambda qk_norm, rotary: ForwardQKNormRotary(qk_norm=qk_norm, rotary=rotary),
)

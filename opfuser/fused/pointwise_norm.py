"""A chain of element-wise operations and the norm after it, in both passes."""

from __future__ import annotations

from collections.abc import Sequence

from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..core.fusion import Env, Fusion, Optional, Refusal, Repeated, Requires
from ..op import FusibleOperation
from ._residual_sum import chain_and_norm_refusal
from .parts.chain import accepts, active, refuse
from .parts.chain_norm import ChainNormPart
from .parts.pipeline import Pipeline


class PointwiseNorm(Pipeline):
    r"""A chain of element-wise operations, MakeExtraOutput, and RMSNorm or LayerNorm.

    .. math:: s = f(x), \quad y = \mathrm{norm}(s)

    f is a chain as in :class:`PointwiseChain`, such as bias, dropout and residual sum; its output s
    may be published. Forward is one kernel: it moves 3A for A elements, A more per extra input of
    the chain, and A less if s is neither published nor saved. Backward is two kernels: that of the
    norm, which adds the gradient of the published s, and that of the chain.

    Saves s and the norm's statistics, one or two per row, and what PointwiseChain saves.

    Chain and norm are two kernels if the norm is over several dimensions, casts under autocast, or
    has rows of more than 32 KiB. On a CPU they run in plain torch, one after the other.

    Kernel: opfuser's own. ATen has none that computes anything before a norm.

    Args:
        before: the operations of the chain, in forward order.
        norm: the norm.
        make_extra: publishes s, or None.

    Raises:
        NotSupportedError: an operation of the chain is not element-wise, or too many have a tensor.
        InputError: in forward, as in the operations that it replaces.

    Attributes:
        planned: whether a plan built it, not the user.
    """

    kernels = ("Triton pointwise",)
    planned: bool = False

    def __init__(
        self,
        *,
        before: Sequence[FusibleOperation],
        norm: RMSNorm | LayerNorm,
        make_extra: MakeExtraOutput | None = None,
    ) -> None:
        super().__init__([ChainNormPart(before, make_extra, norm, type(self).__name__)])


def _refuses(
    before: tuple[FusibleOperation, ...],
    make_extra: MakeExtraOutput | None,
    norm: RMSNorm | LayerNorm,
    *,
    env: Env,
) -> Refusal | None:
    no = refuse(before, env)
    if no is not None:
        return no
    if len(norm.normalized_shape) != 1:
        return Refusal("LAYOUT", "the norm is over several dimensions, the kernel over one")
    kinds = active(before)
    if not kinds:
        return Refusal("LAYOUT", "none of the operations before the norm changes anything")
    return chain_and_norm_refusal(before, kinds)


def _build(
    before: tuple[FusibleOperation, ...],
    make_extra: MakeExtraOutput | None,
    norm: RMSNorm | LayerNorm,
) -> PointwiseNorm:
    fused = PointwiseNorm(before=before, norm=norm, make_extra=make_extra)
    fused.planned = True
    return fused


FUSION = Fusion(
    name="pointwise_norm",
    stage="joint",
    pattern=(
        Repeated("pointwise operation", accepts),
        Optional(MakeExtraOutput),
        (RMSNorm, LayerNorm),
    ),
    refuses=_refuses,
    build=_build,
    requires=Requires(package="triton"),
)

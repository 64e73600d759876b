"""Residual sum and RMSNorm or LayerNorm in forward."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ..basic.add_extra_input import AddExtraInput
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.norm import Norm
from ..basic.rms_norm import RMSNorm
from ..core.context import Contexts, ForwardArguments, ForwardResult
from ..core.fusion import Fusion, Optional
from ..op import FusedOperation
from .parts.norm import NormPart


class ForwardAddNorm(FusedOperation):
    r"""Abstract: a subclass names its norm. Forward of AddExtraInput and a norm.

    .. math:: s = z + x, \quad y = \mathrm{norm}(s)

    z is the extra input, of the shape of x; it is read, never written. With a MakeExtraOutput
    between the two, s is also the extra output: the residual stream of a pre-norm block.
    Saves what the norm saves, s in place of its input.

    For A elements the kernel moves 4A instead of 5A, where x and z have the compute dtype; else
    sum and norm are separate, as they are on a CPU. No kernel of ATen takes a sum.

    Args:
        add: the sum with the extra input.
        make_extra: the operation that publishes the sum, or None.
        norm: the norm.

    Raises:
        InputError: in forward, as in the operations that it replaces.
    """

    def __init__(self, add: AddExtraInput, make_extra: MakeExtraOutput | None, norm: Norm) -> None:
        part = NormPart(add, make_extra, norm)
        super().__init__(part.ops)
        self._part = part

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        extras = given["basic_op_extra_inputs"]
        return self._part.forward(basic_op_ctxs, input_, extras, True, None)


class ForwardAddRMSNorm(ForwardAddNorm):
    """ForwardAddNorm of RMSNorm. Saves (s, rstd).

    Args:
        add: the sum with the extra input.
        make_extra: the operation that publishes the sum, or None.
        rmsnorm: the norm.
    """

    def __init__(
        self, *, add: AddExtraInput, make_extra: MakeExtraOutput | None, rmsnorm: RMSNorm
    ) -> None:
        super().__init__(add, make_extra, rmsnorm)


class ForwardAddLayerNorm(ForwardAddNorm):
    """ForwardAddNorm of LayerNorm. Saves (s, mean, rstd).

    Args:
        add: the sum with the extra input.
        make_extra: the operation that publishes the sum, or None.
        layernorm: the norm.
    """

    def __init__(
        self, *, add: AddExtraInput, make_extra: MakeExtraOutput | None, layernorm: LayerNorm
    ) -> None:
        super().__init__(add, make_extra, layernorm)


FUSION_OF_RMS_NORM = Fusion(
    name="forward_add_rms_norm",
    stage="forward",
    pattern=(AddExtraInput, Optional(MakeExtraOutput), RMSNorm),
    build=lambda add, make_extra, rmsnorm: ForwardAddRMSNorm(
        add=add, make_extra=make_extra, rmsnorm=rmsnorm
    ),
)

FUSION_OF_LAYER_NORM = Fusion(
    name="forward_add_layer_norm",
    stage="forward",
    pattern=(AddExtraInput, Optional(MakeExtraOutput), LayerNorm),
    build=lambda add, make_extra, layernorm: ForwardAddLayerNorm(
        add=add, make_extra=make_extra, layernorm=layernorm
    ),
)

"""Gradient of RMSNorm or LayerNorm and of the residual that starts at its input."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.norm import Norm
from ..basic.rms_norm import RMSNorm
from ..core.context import BackwardResult, Contexts, Extras
from ..core.fusion import Fusion
from ..op import FusedOperation


class BackwardAddNorm(FusedOperation):
    r"""Abstract: a subclass names its norm. Backward of MakeExtraOutput and a norm.

    .. math:: dx = g + dy\, \partial y / \partial x

    g is the gradient of the extra output, and counts as zero where none arrives. It is read, never
    written, whatever ``in_place`` says. dx has the dtype to which torch promotes g and the norm's
    gradient.

    Reads what the norm saved. For A elements the kernel moves 4A instead of 6A, with the gradients
    of the parameters and up to 8192 columns. ATen has no norm backward that adds; on a CPU the sum
    is made in the memory of the norm's gradient.

    Args:
        add: the operation whose extra output is the residual.
        norm: the norm.
    """

    def __init__(self, add: MakeExtraOutput, norm: Norm) -> None:
        super().__init__((add, norm))
        self._parts = add, norm

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        _, norm = self._parts
        (g,) = basic_op_grad_extra_outputs[0]
        dx, grads, _ = norm.gradients(basic_op_ctxs[1], grad_output, g)
        return dx, [(), grads], [(), ()]


class BackwardAddRMSNorm(BackwardAddNorm):
    """BackwardAddNorm of RMSNorm.

    Args:
        add: the operation whose extra output is the residual.
        rmsnorm: the norm.
    """

    fuse_backward_ops: ClassVar[Fusion]

    def __init__(self, *, add: MakeExtraOutput, rmsnorm: RMSNorm) -> None:
        super().__init__(add, rmsnorm)


class BackwardAddLayerNorm(BackwardAddNorm):
    """BackwardAddNorm of LayerNorm.

    Args:
        add: the operation whose extra output is the residual.
        layernorm: the norm.
    """

    def __init__(self, *, add: MakeExtraOutput, layernorm: LayerNorm) -> None:
        super().__init__(add, layernorm)


FUSION_OF_RMS_NORM = Fusion(
    name="backward_add_rms_norm",
    stage="backward",
    pattern=(MakeExtraOutput, RMSNorm),
    build=lambda add, rmsnorm: BackwardAddRMSNorm(add=add, rmsnorm=rmsnorm),
)

FUSION_OF_LAYER_NORM = Fusion(
    name="backward_add_layer_norm",
    stage="backward",
    pattern=(MakeExtraOutput, LayerNorm),
    build=lambda add, layernorm: BackwardAddLayerNorm(add=add, layernorm=layernorm),
)

# A static method of te.ops, which code of users calls.
BackwardAddRMSNorm.fuse_backward_ops = FUSION_OF_RMS_NORM

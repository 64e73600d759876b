"""Gradient of RMSNorm and of the residual that starts at its input."""

from __future__ import annotations

from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..fusion import Fusion
from ._add_norm import BackwardAddNorm

__all__ = ["FUSION", "BackwardAddRMSNorm"]


class BackwardAddRMSNorm(BackwardAddNorm):
    r"""Backward of MakeExtraOutput and RMSNorm: :math:`dx = g + dy\, \partial y / \partial x`.

    g is the gradient of the extra output, and counts as zero where none arrives. It is read, never
    written, whatever ``in_place`` says. dx has the dtype to which torch promotes g and the norm's
    gradient.

    Reads what RMSNorm saved. For A elements the kernel moves 4A instead of 6A, with the gradients
    of the parameters and up to 8192 columns. ATen has no norm backward that adds; on a CPU the sum
    is made in the memory of the norm's gradient.

    Args:
        add: the operation whose extra output is the residual.
        rmsnorm: the norm.
    """

    def __init__(self, *, add: MakeExtraOutput, rmsnorm: RMSNorm) -> None:
        super().__init__(add, rmsnorm)


FUSION = Fusion(
    name="backward_add_rms_norm",
    stage="backward",
    pattern=(MakeExtraOutput, RMSNorm),
    build=lambda add, rmsnorm: BackwardAddRMSNorm(add=add, rmsnorm=rmsnorm),
)

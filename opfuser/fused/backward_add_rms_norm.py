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
    written, whatever ``in_place`` says. Where promotion gives the sum a wider dtype than that of
    the norm's gradient, the sum is a new tensor; else it is made in the memory of that gradient.

    Reads what RMSNorm saved. In one kernel it takes 4A of traffic instead of 6A for A elements of
    dx; ATen has no norm backward that adds, so on a CPU it saves the memory of one dx.

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

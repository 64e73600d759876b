"""Residual sum and RMSNorm in forward."""

from __future__ import annotations

from ..basic.add_extra_input import AddExtraInput
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..fusion import Fusion, Optional
from ._add_norm import ForwardAddNorm
from ._residual_sum import ordered_in_place

__all__ = ["FUSION", "ForwardAddRMSNorm"]


class ForwardAddRMSNorm(ForwardAddNorm):
    r"""Forward of AddExtraInput and RMSNorm.

    .. math:: s = z + x, \quad y = \frac{s}{\sqrt{\mathrm{mean}(s^2) + \epsilon}} w

    z is the extra input, of the shape of x; it is read, never written. With a MakeExtraOutput
    between the two, s is also the extra output: the residual stream of a pre-norm block.
    Saves what RMSNorm saves: (s, rstd).

    For A elements the kernel moves 4A instead of 5A, where x and z have the compute dtype; else
    sum and norm are separate, as they are on a CPU. No kernel of ATen takes a sum.

    Args:
        add: the sum with the extra input.
        make_extra: what publishes the sum, or None.
        rmsnorm: the norm.

    Raises:
        InputError: in forward, as in the operations that it replaces.
    """

    def __init__(
        self, *, add: AddExtraInput, make_extra: MakeExtraOutput | None, rmsnorm: RMSNorm
    ) -> None:
        super().__init__(add, make_extra, rmsnorm)


FUSION = Fusion(
    name="forward_add_rms_norm",
    stage="forward",
    pattern=(AddExtraInput, Optional(MakeExtraOutput), RMSNorm),
    refuses=lambda *ops, env: ordered_in_place(ops, env),
    build=lambda add, make_extra, rmsnorm: ForwardAddRMSNorm(
        add=add, make_extra=make_extra, rmsnorm=rmsnorm
    ),
)

"""What gated activations check, beside the math in ``opfuser.kernels.gated``."""

from __future__ import annotations

import math

from torch import Tensor

from ..errors import ArgumentError, InputError
from ..kernels.capped_functions import ClampedSwish, ShiftedClamp, SoftCap, SoftCappedSwish
from ..kernels.gated_plain import Glu
from ..kernels.scalar import ScalarFunction

Functions = tuple[ScalarFunction, ScalarFunction | None]
"""Those applied to gates and to linear units; None is the identity."""


def situ(beta1: float, beta2: float) -> Functions:
    """The functions of SiTUGLU, applied to gates and to linear units."""
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 < beta < math.inf:
            raise ArgumentError.explained(
                f"{name} must be finite and positive", received=f"{name}={beta}"
            )
    return SoftCappedSwish(beta1), SoftCap(beta2)


def clamped_swish(limit: float, alpha: float, offset: float) -> Functions:
    """The functions of ClampedSwiGLU, applied to gates and to linear units."""
    if not limit > 0:
        raise ArgumentError.explained("limit must be positive", received=f"limit={limit}")
    return ClampedSwish(alpha, limit), ShiftedClamp(limit, offset)


def make_glu(functions: Functions, interleave: int | None) -> Glu:
    """The gated product of those functions, in that layout."""
    if interleave is not None and interleave < 1:
        raise ArgumentError.explained(
            "glu_interleave_size must be positive or None", received=str(interleave)
        )
    return Glu(*functions, interleave)


def check_glu_input(glu: Glu, x: Tensor, where: str) -> None:
    """Raises InputError unless the last dimension divides into gates and linear units."""
    unit = 2 * (glu.interleave or 1)
    if x.dim() and not x.shape[-1] % unit:
        return
    raise InputError.explained(
        f"The last dimension must be a multiple of {unit}, to divide into gates and linear units",
        where=where,
        received=f"shape {tuple(x.shape)}",
        remedy="Give the operation before it twice as many output features as this one's",
    )

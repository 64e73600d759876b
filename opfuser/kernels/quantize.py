"""Quantisation of matrices to fp8, by rows, by columns (the transpose) or both from one read.

Dimensions: R rows, Rp of them with padding, C columns; ``x (R, C)``. Results are :class:`Codes`.
``dtype`` is ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``. A scale s multiplies what is encoded:
the code is ``x s``, rounded to nearest even and saturating at :func:`largest`; NaN stays NaN.
:class:`Codes` hold ``1 / s``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantize_plain import (
    Codes,
    amax_of,
    by_blocks_plain,
    by_squares_plain,
    by_tensor_plain,
    largest,
    scale_for_plain,
)

__all__ = [
    "Codes",
    "amax_of",
    "largest",
    "quantize_by_blocks",
    "quantize_by_squares",
    "quantize_by_tensor",
    "scale_for",
]


def scale_for(
    amax: Tensor, dtype: torch.dtype, *, power_of_two: bool = False, margin: int = 0
) -> Tensor:
    """Scales ``s = largest / amax / 2^margin`` in fp32, in the shape of amax.

    ``largest / amax`` is 1 where amax is 0, the largest finite value instead of infinity, and NaN
    where amax is not finite: a saturating code would hide that. With ``power_of_two`` it is rounded
    down to a power of two.
    """
    return scale_for_plain(amax, dtype, power_of_two, margin)


def quantize_by_tensor(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    cols: bool,
    amax: Tensor | None = None,
    column_sum: bool = False,
) -> Codes:
    """Codes of x with one given scale.

    Args:
        x: (R, C) in fp32, bf16 or fp16.
        scale: s, (1,) in fp32.
        dtype: of the codes.
        rows, cols: which layouts are wanted.
        amax: (1,) in fp32, not negative; becomes ``max(amax, max |x|)`` in place, and NaN wins.
        column_sum: whether sums over the rows of x are wanted, accumulated in fp32.
    """
    return by_tensor_plain(x, scale, dtype, rows, cols, amax, column_sum)


def quantize_by_blocks(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    cols: bool,
    power_of_two: bool = True,
    column_sum: bool = False,
) -> Codes:
    """Codes of x where every 128 neighbours along a row (of ``cols``: a column) have a scale.

    Args as in :func:`quantize_by_tensor` and :func:`scale_for`; C is a multiple of 128.
    """
    return by_blocks_plain(x, dtype, rows, cols, power_of_two, column_sum)


def quantize_by_squares(
    x: Tensor, dtype: torch.dtype, *, rows: bool, cols: bool, power_of_two: bool = True
) -> Codes:
    """Codes of x where every 128 × 128 square has a scale, the same one in both layouts.

    Args as in :func:`quantize_by_tensor` and :func:`scale_for`; C is a multiple of 128.
    """
    return by_squares_plain(x, dtype, rows, cols, power_of_two)

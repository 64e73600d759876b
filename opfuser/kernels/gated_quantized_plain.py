"""Gated products to fp8, and gradients, in plain torch; as in ``opfuser.kernels.gated_quantized``.

What is encoded is computed in fp32 and rounded once. Kernels compute it with other functions of
their own, so that a code may differ by one step where a value is close to the middle of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .gated_plain import ProductSpec, backward_plain, forward_plain
from .quantize_plain import BlockScaling, Codes, Scaling, dequantize, quantize_plain
from .scalar import cast, wide_dtype

# How x is saved. Scales that are no powers of two leave 3 % less error of normal values, and of
# values with outliers 18 %.
SAVED = BlockScaling(torch.float8_e4m3fn, power_of_two=False)


class GatedOutput(NamedTuple):
    """What forward returns.

    Attributes:
        h: the output, by rows.
        x: the input, by rows in blocks; None if it is not wanted.
    """

    h: Codes
    x: Codes | None


class GatedGrads(NamedTuple):
    """What backward returns.

    Attributes:
        dx: gradient of x, by rows and by columns; ``column_sum`` is that of the bias.
        h: the output again, by columns.
    """

    dx: Codes
    h: Codes


def _wide(x: Tensor, bias: Tensor | None) -> Tensor:
    """``x + bias`` in fp32, or fp64 for fp64."""
    wide = wide_dtype(x.dtype)
    return cast(x, wide) if bias is None else cast(x, wide) + cast(bias, wide)


def forward_quantized_plain(
    x: Tensor, bias: Tensor | None, spec: ProductSpec, scaling: Scaling, want_x: bool
) -> GatedOutput:
    """As ``gated_quantized.gated_forward_quantized``, or ``gated_forward_and_input``."""
    h = quantize_plain(forward_plain(_wide(x, bias), spec, None), scaling, True, False)
    return GatedOutput(h, quantize_plain(x, SAVED, True, False) if want_x else None)


def backward_quantized_plain(
    dy: Tensor,
    x: Tensor | Codes,
    bias: Tensor | None,
    spec: ProductSpec,
    dx_scaling: Scaling,
    h_scaling: Scaling,
    column_sum: bool,
) -> GatedGrads:
    """As ``gated_quantized.gated_backward_quantized``."""
    dtype = dy.dtype
    if isinstance(x, Codes):
        x = dequantize(x, dy.shape[0], wide_dtype(dtype))
    else:
        dtype = x.dtype
    dx, _, h = backward_plain(dy, _wide(x, bias), spec, None, True, True)
    assert dx is not None
    assert h is not None
    codes = quantize_plain(dx, dx_scaling, True, True, column_sum)
    if codes.column_sum is not None:
        codes = codes._replace(column_sum=cast(codes.column_sum, dtype))
    return GatedGrads(codes, quantize_plain(h, h_scaling, False, True))

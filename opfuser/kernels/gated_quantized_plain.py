"""Gated products to fp8, and gradients, in plain torch; as in ``opfuser.kernels.gated_quantized``.

What is encoded is computed in fp32 and rounded once. Kernels compute it with other functions of
their own, so that a code may differ by one step where a value is close to the middle of two.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .gated_plain import ProductSpec, backward_plain, forward_plain
from .quantize_plain import Codes, Scaling, quantize_plain
from .scalar import cast, wide_dtype

__all__ = ["GatedGrads", "backward_quantized_plain", "forward_quantized_plain"]


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
    x: Tensor, bias: Tensor | None, spec: ProductSpec, scaling: Scaling
) -> Codes:
    """As ``gated_quantized.gated_forward_quantized``."""
    return quantize_plain(forward_plain(_wide(x, bias), spec, None), scaling, True, False)


def backward_quantized_plain(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    spec: ProductSpec,
    dx_scaling: Scaling,
    h_scaling: Scaling,
    column_sum: bool,
) -> GatedGrads:
    """As ``gated_quantized.gated_backward_quantized``."""
    dx, _, h = backward_plain(dy, _wide(x, bias), spec, None, True, True)
    assert dx is not None
    assert h is not None
    codes = quantize_plain(dx, dx_scaling, True, True, column_sum)
    if codes.column_sum is not None:
        codes = codes._replace(column_sum=cast(codes.column_sum, x.dtype))
    return GatedGrads(codes, quantize_plain(h, h_scaling, False, True))

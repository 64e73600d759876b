"""Gated products to fp8, and gradients, in plain torch; as in ``opfuser.kernels.gated_quantized``.

What is encoded is computed in fp32 and rounded once. Kernels compute it with other functions of
their own, so that a code may differ by one step where a value is close to the middle of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .gated_plain import ProductSpec, backward_plain, forward_plain
from .quantize_plain import Codes, raise_amax, tensor_codes
from .scalar import cast, wide_dtype

__all__ = ["GatedGrads", "backward_quantized_plain", "forward_quantized_plain"]


class GatedGrads(NamedTuple):
    """What backward returns.

    Attributes:
        dx: gradient of x, by rows and by columns.
        h: the output again, by columns.
    """

    dx: Codes
    h: Codes


def forward_quantized_plain(
    x: Tensor, spec: ProductSpec, scale: Tensor, dtype: torch.dtype, amax: Tensor | None
) -> Codes:
    """As ``gated_quantized.gated_forward_quantized``."""
    h = forward_plain(cast(x, wide_dtype(x.dtype)), spec, None)
    raise_amax(amax, h)
    return tensor_codes(h, scale, dtype, True, False)


def backward_quantized_plain(
    dy: Tensor,
    x: Tensor,
    spec: ProductSpec,
    dx_scale: Tensor,
    dx_dtype: torch.dtype,
    h_scale: Tensor,
    h_dtype: torch.dtype,
    dx_amax: Tensor | None,
    h_amax: Tensor | None,
) -> GatedGrads:
    """As ``gated_quantized.gated_backward_quantized``."""
    dx, _, h = backward_plain(dy, cast(x, wide_dtype(x.dtype)), spec, None, True, True)
    assert dx is not None
    assert h is not None
    raise_amax(dx_amax, dx)
    raise_amax(h_amax, h)
    return GatedGrads(
        tensor_codes(dx, dx_scale, dx_dtype, True, True),
        tensor_codes(h, h_scale, h_dtype, False, True),
    )

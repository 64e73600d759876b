"""Norms of rows to fp8 in plain torch; as in ``opfuser.kernels.norm_quantized``.

What is encoded is computed in fp32 from saved statistics and rounded once. Where there is a bias,
a GPU adds it to a product that it has not rounded, so that a code may differ by one step from that
of a kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .norm import norm_forward
from .quantize_plain import Codes, Scaling, quantize_plain
from .scalar import cast, wide_dtype


class QuantizedNorm(NamedTuple):
    """As ``NormForward``, with codes of the norm by rows.

    Attributes:
        y: the norm, without codes if nothing was to be encoded.
        total, mean, rstd: with the bits of ``norm.norm_forward``.
    """

    y: Codes
    total: Tensor | None
    mean: Tensor | None
    rstd: Tensor


def forward_quantized_plain(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    with_mean: bool,
    scaling: Scaling,
) -> QuantizedNorm:
    """``norm.norm_forward`` with codes of y by rows.

    Without a scale amax alone is raised, and y has no codes; total and statistics are there as
    ever. The codes are then those of a second call, for total without the residual where there was
    one: it reads less, and computes the same statistics again.

    Args:
        x, residual, weight, bias, eps, zero_centered, with_mean: as ``norm.norm_forward``.
        scaling: how y is quantized.

    Raises:
        RuntimeError: of blocks, D is not a multiple of 128.
        ValueError: of kernels, the elements of a row are not side by side.
    """
    # For its statistics: a kernel may compute them, as of rows that are too long for one of fp8.
    _, total, mean, rstd = norm_forward(x, residual, weight, bias, eps, zero_centered, with_mean)
    y = _again(x if total is None else total, weight, bias, mean, rstd, zero_centered)
    return QuantizedNorm(quantize_plain(y, scaling, True, False), total, mean, rstd)


def cols_quantized_plain(
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered: bool,
    scaling: Scaling,
) -> Codes:
    """Codes by columns of the norm that forward encodes by rows, from its statistics.

    With one scale they are the transpose of those by rows.

    Args:
        total: (…, D), what was normalized: x, or its sum with the residual.
        mean, rstd: (…), what forward returned.
        scaling: how the norm is quantized; without a scale amax alone is raised.

    Raises:
        ValueError: of kernels, the elements of a row are not side by side.
    """
    return quantize_plain(
        _again(total, weight, bias, mean, rstd, zero_centered), scaling, False, True
    )


def _again(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered: bool,
) -> Tensor:
    """The norm, (R, D), from its statistics, by the operations of the kernels."""
    dtype = wide_dtype(x.dtype)
    x = cast(x, dtype).reshape(rstd.numel(), x.shape[-1])
    if mean is not None:
        x = x - mean.reshape(-1, 1)
    y = x * rstd.reshape(-1, 1)
    if weight is not None:
        scale = weight.to(dtype)
        y.mul_(scale + 1 if zero_centered else scale)
    # That 0 is added shows in the sign of a product which is 0.
    return y.add_(0.0 if bias is None else bias.to(dtype))

"""Norms of rows to fp8: by rows in forward, and again by columns from what forward left.

Dimensions: R rows, D columns. x, residual and total are ``(…, D)``, of one shape, with R rows in
all; the elements of a row are side by side. Codes are those of the matrix (R, D); scalings, padding
and layouts are as in ``opfuser.kernels.quantize``, norms as in ``opfuser.kernels.norm``. Arguments
and results: ``norm_quantized_plain``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .choice import kernel_or_plain
from .launch import Launch, has_fp8
from .norm_launch import FORWARD, RowLaunch, forward_tile, share_of_sum, strided_rows
from .norm_quantized_plain import QuantizedNorm, cols_quantized_plain, forward_quantized_plain
from .quantize import ScaleKind, Tile, empty_block_scales, empty_codes, scale_and_raised, scale_kind
from .quantize_plain import BLOCK, BlockScaling, Codes, Scaling
from .tiling import cdiv, empty_contiguous

# At most 64 registers on sm_90, and whole cache lines of the transpose: 33.3 us of 8192 x 4096,
# 0.72 of a device-to-device copy on an H200. By 4 warps 32.4 us, of 64 x 64 by 8 36.8.
_COLS = Tile(128, 64, 8)
_COLS_OF_BLOCKS = Tile(BLOCK, BLOCK, 8)  # 36.9 us, 0.65; by 4 warps 41.6, by 16 57.5
_ACCESS = 16  # bytes that a thread reads at once


def _square_cols(scaling: Scaling) -> bool:
    return isinstance(scaling, BlockScaling) and scaling.square_cols


@functools.lru_cache(None)
def _forward_launch(
    cols: int, with_mean: bool, alone: bool, zero_centered: bool, kind: ScaleKind, itemsize: int
) -> RowLaunch:
    rows, block_cols, warps = forward_tile(cols, with_mean, alone)
    constants = {
        "ZERO_CENTERED": zero_centered,
        **kind.constants(),
        "BLOCK": BLOCK,
        "BLOCK_ROWS": rows,
        "BLOCK_COLS": block_cols,
        "VEC": min(_ACCESS // itemsize, block_cols),
    }
    return RowLaunch(Launch("norm_quantized:forward", constants, num_warps=warps), rows)


@functools.lru_cache(None)
def _cols_launch(
    tile: Tile, zero_centered: bool, kind: ScaleKind, square_cols: bool, itemsize: int, even: bool
) -> Launch:
    constants = {"ZERO_CENTERED": zero_centered, **kind.constants(), "SQUARE_COLS": square_cols}
    return tile.launch("norm_quantized:columns", constants, itemsize, even)


def _launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    with_mean: bool,
    scaling: Scaling,
) -> QuantizedNorm:
    cols = x.shape[-1]
    total = None if residual is None else empty_contiguous(x)
    rstd = x.new_empty(*x.shape[:-1] or ((),), dtype=torch.float32)
    mean = torch.empty_like(rstd) if with_mean else None
    rows = rstd.numel()
    scale, amax, padded, codes, inverse = _memory(rstd, cols, scaling, by_rows=True)
    x, stride = strided_rows(x)
    residual, residual_stride = (None, 0) if residual is None else strided_rows(residual)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    launch, block_rows = _forward_launch(
        cols, with_mean, residual is None, zero_centered, scale_kind(scaling), x.element_size()
    )
    launch(
        (cdiv(padded, block_rows), 1, 1),
        (x, residual, weight, bias, total, mean, rstd, scale, codes, inverse, amax),
        (rows, padded, cols, stride, residual_stride),
        (eps, share_of_sum(weight, cols)),
    )
    return QuantizedNorm(Codes(codes, inverse, None, None, None), total, mean, rstd)


def _launch_cols(
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    zero_centered: bool,
    scaling: Scaling,
) -> Codes:
    rows, cols, rstd = rstd.numel(), total.shape[-1], rstd.contiguous()
    scale, amax, padded, codes, inverse = _memory(rstd, cols, scaling, by_rows=False)
    tile = _COLS_OF_BLOCKS if isinstance(scaling, BlockScaling) else _COLS
    x, stride = strided_rows(total)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    mean = None if mean is None else mean.contiguous()
    launch = _cols_launch(
        tile, zero_centered, scale_kind(scaling), _square_cols(scaling), x.element_size(),
        tile.even(rows, cols),
    )  # fmt: skip
    launch(
        (tile.programs(padded, cols), 1, 1),
        (x, weight, bias, mean, rstd, scale, codes, inverse, amax),
        (rows, padded, cols, stride),
    )
    return Codes(None, None, codes, inverse, None)


def _memory(
    rstd: Tensor, cols: int, scaling: Scaling, by_rows: bool
) -> tuple[Tensor | None, Tensor | None, int, Tensor | None, Tensor | None]:
    """Scale and amax, the rows with padding, and memory for codes in one layout and for 1 / s."""
    scale = amax = None
    if not isinstance(scaling, BlockScaling):
        scale, amax = scale_and_raised(scaling)
        if scale is None:
            return None, amax, cdiv(rstd.numel(), BLOCK) * BLOCK, None, None
    padded, *layouts = empty_codes(rstd.view(-1), cols, scaling.dtype, by_rows, not by_rows)
    inverse: Tensor | None
    if scale is not None:
        inverse = torch.empty_like(scale)
    else:
        squares = _square_cols(scaling)
        inverses = empty_block_scales(
            rstd.view(-1), cols, by_rows, not by_rows, square_cols=squares
        )
        inverse = inverses[not by_rows]
    return scale, amax, padded, layouts[not by_rows], inverse


def _takes_blocks(scaling: Scaling, cols: int) -> bool:
    return not isinstance(scaling, BlockScaling) or cols % BLOCK == 0


def _takes_forward(x: Tensor, residual: Tensor | None, *others: Any) -> bool:
    cols = x.shape[-1]
    return (
        x.numel() > 0
        and cols <= FORWARD.max_cols
        and (residual is None or residual.dtype != torch.float64)
        and _takes_blocks(others[-1], cols)
        and has_fp8(x)
    )


def _takes_cols(total: Tensor, *others: Any) -> bool:
    return total.numel() > 0 and _takes_blocks(others[-1], total.shape[-1]) and has_fp8(total)


norm_forward_quantized = kernel_or_plain(
    launch=_launch_forward, plain=forward_quantized_plain, accepts=_takes_forward
)
norm_cols_quantized = kernel_or_plain(
    launch=_launch_cols, plain=cols_quantized_plain, accepts=_takes_cols
)

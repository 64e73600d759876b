"""Quantization to MXFP8 and NVFP4: blocks of 32 and 16 values, with scales of 8 bits.

Dimensions: R rows, Rp the next multiple of 128, C columns, a multiple of 32; ``x (R, C)``. Results
are :class:`Codes` whose scales are those that GEMMs take, inverse and swizzled
(:func:`microscaling_plain.swizzled`), flat: of a matrix (M, K), M of them rounded up to a multiple
of 128 times K / 32 (NVFP4: K / 16), rounded up to one of 4. With up(n, m) for that:

======  ==========================  ===================================  ==========================
        rows, cols                  row_scale                            col_scale
======  ==========================  ===================================  ==========================
MXFP8   (Rp, C), (C, Rp)            Rp up(C/32, 4), E8M0                 up(C, 128) Rp/32, E8M0
NVFP4   (Rp, C/2), (C, Rp/2),       Rp up(C/16, 4) + 4, E4M3             up(C, 128) Rp/16 + 4, E4M3
        two codes in a byte
======  ==========================  ===================================  ==========================

The last 4 bytes of NVFP4's are the scale of the tensor, in fp32. So codes and scales are two
tensors in every format.

Rows may be those of groups, as in :mod:`.groups`: codes by rows then have no padding, (R, C) and
(R, C/2), and by columns (C, P) and (C, P/2), so that no block spans two groups. Where groups have
scales of tensors of their own, there are G of them at the end.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .choice import kernel_or_plain
from .groups import lanes_of
from .groups_plain import Grouped, count_rows, padded_size
from .launch import FP8, Launch, has_fp4, has_fp8
from .microscaling_plain import (
    E8M0,
    FP4,
    TAIL,
    TRANSFORM,
    decode_plain,
    mxfp8_plain,
    nvfp4_plain,
    tensor_scale,
)
from .quantize import BLOCK, Codes, Tile, add_up, empty_sums
from .tiling import cdiv, rows_of

# A tile has whole tiles of scales in both layouts. With 128 rows of NVFP4, stochastic rounding
# would spill.
_NVFP4 = Tile(64, 128, 8)
_MXFP8 = Tile(128, 128, 8)
_DECODED = {"TILE_ROWS": 32, "TILE_COLS": 128}


@functools.lru_cache(None)
def _mxfp8_launch(dtype: torch.dtype, lanes: int, itemsize: int, even: bool) -> Launch:
    constants = {"E5M2": dtype == torch.float8_e5m2, "GROUPS": lanes}
    return _MXFP8.launch("microscaling:mxfp8", constants, itemsize, even)


@functools.lru_cache(None)
def _nvfp4_launch(
    signs: int, squares: bool, converts: bool, lanes: int, itemsize: int, even: bool
) -> Launch:
    constants = {"SIGNS": signs, "SQUARES": squares, "CONVERTS": converts, "GROUPS": lanes}
    return _NVFP4.launch("microscaling:nvfp4", constants, itemsize, even)


@functools.lru_cache(None)
def _decode_launch(dtype: torch.dtype, even: bool) -> Launch:
    constants = {"FP4": dtype == FP4, "E5M2": dtype == torch.float8_e5m2, "EVEN": even}
    return Launch("microscaling:decode", {**constants, **_DECODED})


def _sizes(x: Tensor, groups: Grouped | None) -> tuple[int, int, int, int]:
    """Rows of codes by rows, and with padding; lanes for groups, and rows of each, or of x."""
    if groups is None:
        padded = cdiv(len(x), BLOCK) * BLOCK
        return padded, padded, 0, len(x)
    rows, count = count_rows(x, groups), groups.groups
    return rows, padded_size(rows, groups), lanes_of(count), rows // count


def _empty_scales(x: Tensor, rows: int, cols: int, block: int, tail: int = 0) -> Tensor:
    """Memory for the scales of a matrix (rows, cols)."""
    size = cdiv(rows, 128) * cdiv(cols, 4 * block) * 512 + tail
    return x.new_empty(size, dtype=torch.uint8)


def _launch_mxfp8(
    x: Tensor,
    dtype: torch.dtype,
    rows: bool,
    cols: bool,
    column_sum: bool,
    groups: Grouped | None = None,
) -> Codes:
    features, (own, padded, lanes, size) = x.shape[1], _sizes(x, groups)
    count, ends, sources = groups or (0, None, None)
    by_rows = x.new_empty((own, features), dtype=dtype) if rows else None
    by_cols = x.new_empty((features, padded), dtype=dtype) if cols else None
    row_scale = _empty_scales(x, own, features, 32) if rows else None
    col_scale = _empty_scales(x, features, padded, 32) if cols else None
    sums, parts = empty_sums(x, padded, _MXFP8, column_sum)
    even = groups is None and _MXFP8.even(len(x), features)
    launch = _mxfp8_launch(dtype, lanes, x.element_size(), even)
    x, stride = rows_of(x)
    tensors = (x, sources, ends, by_rows, row_scale, by_cols, col_scale, parts)
    grid = _MXFP8.programs(padded, features), 1, 1
    launch(grid, tensors, (size, padded, features, stride, count))
    add_up(sums, parts)
    return Codes(by_rows, _as(row_scale, E8M0), by_cols, _as(col_scale, E8M0), sums)


def _launch_nvfp4(
    x: Tensor,
    amax: Tensor,
    rows: bool,
    cols: bool,
    squares: bool,
    transform: bool,
    seed: Tensor | None,
    column_sum: bool,
    groups: Grouped | None = None,
) -> Codes:
    features, (own, padded, lanes, size) = x.shape[1], _sizes(x, groups)
    count, ends, sources = groups or (0, None, None)
    by_rows = by_cols = row_scale = col_scale = None
    tail = TAIL * len(amax)
    if rows:
        by_rows = x.new_empty((own, features // 2), dtype=torch.uint8)
        row_scale = _empty_scales(x, own, features, 16, tail)
    if cols:
        by_cols = x.new_empty((features, padded // 2), dtype=torch.uint8)
        col_scale = _empty_scales(x, features, padded, 16, tail)
    sums, parts = empty_sums(x, padded, _NVFP4, column_sum)
    signs = TRANSFORM if transform and cols else 0
    even = groups is None and _NVFP4.even(len(x), features)
    launch = _nvfp4_launch(signs, squares, has_fp4(x), lanes, x.element_size(), even)
    x, stride = rows_of(x)
    tensors = (x, sources, ends, amax, seed, by_rows, row_scale, by_cols, col_scale, parts)
    grid = _NVFP4.programs(padded, features), 1, 1
    filled, step = cdiv(own, BLOCK) * BLOCK, int(len(amax) > 1)
    launch(grid, tensors, (size, filled, padded, features, stride, count, step))
    add_up(sums, parts)
    scales = (_as(scale, torch.float8_e4m3fn) for scale in (row_scale, col_scale))
    return Codes(_as(by_rows, FP4), next(scales), _as(by_cols, FP4), next(scales), sums)


def _launch_decode(codes: Tensor, scale: Tensor) -> Tensor:
    rows, features = codes.shape[0], codes.shape[1] * (2 if codes.dtype == FP4 else 1)
    values = codes.new_empty((rows, features), dtype=torch.bfloat16)
    down, across = _DECODED.values()
    launch = _decode_launch(codes.dtype, rows % down == 0 and features % across == 0)
    given, stride = rows_of(codes.view(torch.uint8))
    grid = cdiv(rows, down), cdiv(features, across), 1
    launch(grid, (given, scale.view(torch.uint8), values), (rows, features, stride))
    return values


def _as(bytes_: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bytes_ is None else bytes_.view(dtype)


def _takes(x: Tensor, *_: Any) -> bool:
    return x.numel() > 0 and x.shape[1] % 32 == 0 and has_fp8(x)  # plain torch raises for others


_mxfp8 = kernel_or_plain(launch=_launch_mxfp8, plain=mxfp8_plain, accepts=_takes)
_nvfp4 = kernel_or_plain(launch=_launch_nvfp4, plain=nvfp4_plain, accepts=_takes)
decode = kernel_or_plain(
    launch=_launch_decode,
    plain=decode_plain,
    accepts=lambda codes, _: codes.numel() > 0 and has_fp8(codes),
    dtypes=FP8 | {FP4},
)


def quantize_mxfp8(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    cols: bool,
    column_sum: bool = False,
    groups: Grouped | None = None,
) -> Codes:
    """Codes of x where every 32 neighbors along a row (of ``cols``: a column) have a scale.

    ``1 / s = 2^k`` with the least k, from -127 on, for which ``amax / 2^k`` is at most the largest
    finite value of ``dtype``; 1 of amax 0, and NaN if amax is not finite. A code is ``x s``,
    rounded to nearest even. The format is that of OCP, "Microscaling Formats (MX) Specification
    v1.0"; its scales are rounded up, as in Mishra et al., arXiv:2506.08027.

    Args:
        x: (R, C) in fp32, bf16 or fp16.
        dtype: of the codes, E4M3 or E5M2.
        rows, cols: which layouts are wanted.
        column_sum: whether sums over the rows of x are wanted, accumulated in fp32.
        groups: whose rows they are, if any.
    """
    return _mxfp8(x, dtype, rows, cols, column_sum, groups)


def quantize_nvfp4(
    x: Tensor,
    amax: Tensor,
    *,
    rows: bool,
    cols: bool,
    squares: bool = False,
    transform: bool = False,
    seed: Tensor | None = None,
    column_sum: bool = False,
    groups: Grouped | None = None,
) -> Codes:
    """Codes of x in 4 bits, a scale for every 16 neighbors, and one of the tensor.

    With the scale of the tensor ``g = amax / 2688`` (6 · 448) and that of a block ``d = amax of the
    block / (6 g)``, rounded to E4M3, a code is ``x / (g d)``, rounded to E2M1; 0 where d is. NaN
    are g and d of a tensor that is not finite, but for d of zeros. NVIDIA, arXiv:2509.25149.

    Args:
        x: (R, C) in fp32, bf16 or fp16.
        amax: ``max |x|``, (1,) in fp32; or (G,), one for each group.
        rows, cols: which layouts are wanted.
        squares: whether 16 x 16 have a scale instead, the same in both layouts.
        transform: whether ``cols`` are those of x with every 16 rows multiplied by the orthogonal
            matrix of :func:`microscaling_plain.transformed`, and ``4 amax`` for amax. Rows up to a
            multiple of 16 then count as rows of x.
        seed: (1,) int64, for stochastic rounding; None: to nearest even.
        column_sum: whether sums over the rows of x are wanted, accumulated in fp32.
        groups: as in :func:`quantize_mxfp8`.
    """
    return _nvfp4(x, amax, rows, cols, squares, transform, seed, column_sum, groups)


def dequantized_rows(codes: Codes, rows: int) -> Tensor:
    """The values of so many rows in fp32, of codes by rows."""
    assert codes.rows is not None
    assert codes.row_scale is not None
    values = decode(codes.rows, codes.row_scale)[:rows].float()
    return (
        values.mul_(tensor_scale(codes.rows, codes.row_scale))
        if codes.rows.dtype == FP4
        else values
    )

"""Quantization to fp8 of matrices whose rows are those of groups; the host knows no group's size.

Dimensions: R rows, G groups, C columns; P rows where each group is padded to a multiple of 128, at
least 128: a GEMM that sums over the rows of a group wants it to begin at a multiple of 16, and to
have rows. Results are :class:`Codes`, with

- rows: (R, C), without padding; row_scale (R,), or (C/128, R) of blocks;
- cols: (C, P), zeros in padding; col_scale (G C,), or (P/128, C) of blocks, or
  (C/128, up4(P/128)) of squares.

Rows behind the last group are left undefined, and so are columns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .choice import kernel_or_plain
from .groups_plain import (
    Grouped,
    GroupScaling,
    VectorScaling,
    by_blocks_in_groups_plain,
    by_vectors_plain,
    count_rows,
    gathered,
    group_ends_plain,
    maxima_plain,
    padded_size,
)
from .launch import Launch, has_fp8
from .quantize import (
    BLOCK,
    BlockScaling,
    Codes,
    ScaleKind,
    Tile,
    scale_kind,
    scales_in_fours,
)
from .tiling import rows_of

__all__ = [
    "GroupScaling",
    "Grouped",
    "VectorScaling",
    "gathered",
    "group_ends",
    "maxima_of_groups",
    "quantize_groups",
]

_INTEGERS = frozenset((torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64))
# As those of a whole matrix in ``quantize``, but with masks at the ends of groups: not measured.
_ROWS = Tile(BLOCK, BLOCK, 8)
_BOTH = Tile(BLOCK, 64, 4)
_SQUARE = Tile(BLOCK, BLOCK, 8)


def lanes_of(groups: int) -> int:
    """How many values a program holds of one for each group."""
    return 1 << max(groups - 1, 15).bit_length()


@functools.lru_cache(None)
def _ends_launch(groups: int) -> Launch:
    return Launch("groups:ends", {"GROUPS": lanes_of(groups), "TILE_ROWS": BLOCK}, num_warps=1)


@functools.lru_cache(None)
def _launch(
    function: str, own: tuple[tuple[str, Any], ...], tile: Tile, groups: int, size: int, even: bool
) -> Launch:
    constants = {**dict(own), "GROUPS": lanes_of(groups)}
    return tile.launch(f"groups:{function}", constants, size, even)


def _launch_ends(sizes: Tensor, rows: int) -> Tensor:
    ends = sizes.new_empty((2, len(sizes)), dtype=torch.int32)
    _ends_launch(len(sizes))((1, 1, 1), (sizes.contiguous(), ends), (len(sizes), rows))
    return ends


def _launch_maxima(
    x: Tensor, groups: Grouped, rows: bool, cols: bool
) -> tuple[Tensor | None, Tensor | None]:
    count, features, (number, ends, sources) = count_rows(x, groups), x.shape[1], groups
    numbers = count * rows, number * features * cols
    parts = x.new_zeros(sum(numbers), dtype=torch.float32).split(numbers)
    most = [part if n else None for part, n in zip(parts, (rows, cols))]
    padded = padded_size(count, groups)
    launch = _launch("maxima", (), _ROWS, number, x.element_size(), features % _ROWS.cols == 0)
    x, stride = rows_of(x)
    ints = (number, padded, features, stride, count // number)
    launch((_ROWS.programs(padded, features), 1, 1), (x, sources, ends, *most), ints)
    return most[0], most[1]


def _launch_by_vectors(x: Tensor, groups: Grouped, scaling: Any, rows: bool, cols: bool) -> Codes:
    count, features, (number, ends, sources) = count_rows(x, groups), x.shape[1], groups
    padded, dtype = padded_size(count, groups), scaling.dtype
    scale = amax = row_amax = col_amax = None
    if isinstance(scaling, VectorScaling):
        row_amax, col_amax = maxima_of_groups(x, groups, rows=rows, cols=cols)
        kind = ScaleKind(dtype, True, scaling.power_of_two)
    else:
        kind = scale_kind(scaling)
        scale, amax = (scaling.amax, None) if kind.measured else (scaling.scale, scaling.amax)
    tile = _BOTH if cols else _ROWS
    made = (
        x.new_empty((count, features), dtype=dtype) if rows else None,
        x.new_empty(count, dtype=torch.float32) if rows else None,
        x.new_empty((features, padded), dtype=dtype) if cols else None,
        x.new_empty(number * features, dtype=torch.float32) if cols else None,
    )
    own = tuple(kind.constants().items())
    even = features % tile.cols == 0
    launch = _launch("by_vectors", own, tile, number, x.element_size(), even)
    x, stride = rows_of(x)
    step = 0 if scale is None or scale.numel() == 1 else 1
    ints = (number, padded, features, stride, count // number, step)
    tensors = (x, sources, ends, row_amax, col_amax, scale, *made, amax)
    launch((tile.programs(padded, features), 1, 1), tensors, ints)
    return Codes(*made, None)


def _launch_by_blocks(
    x: Tensor, groups: Grouped, scaling: BlockScaling, rows: bool, cols: bool
) -> Codes:
    count, features, (number, ends, sources) = count_rows(x, groups), x.shape[1], groups
    padded = padded_size(count, groups)
    blocks, across = padded // BLOCK, features // BLOCK
    dtype, power_of_two, square_cols = scaling
    col_scale = None
    if cols:
        of_blocks = (blocks, features)
        col_scale = (
            scales_in_fours(x, across, blocks)
            if square_cols
            else x.new_empty(of_blocks, dtype=torch.float32)
        )
    made = (
        x.new_empty((count, features), dtype=dtype) if rows else None,
        x.new_empty((across, count), dtype=torch.float32) if rows else None,
        x.new_empty((features, padded), dtype=dtype) if cols else None,
        col_scale,
    )
    flags = {
        "E5M2": dtype == torch.float8_e5m2,
        "POWER_OF_TWO": power_of_two,
        "SQUARE_COLS": square_cols,
    }
    launch = _launch("by_blocks", tuple(flags.items()), _SQUARE, number, x.element_size(), True)
    x, stride = rows_of(x)
    ints = (count, number, padded, features, stride)
    launch((blocks * across, 1, 1), (x, sources, ends, *made), ints)
    return Codes(*made, None)


def _takes(x: Tensor, *_: Any) -> bool:
    return has_fp8(x)


group_ends = kernel_or_plain(launch=_launch_ends, plain=group_ends_plain, dtypes=_INTEGERS)
_maxima = kernel_or_plain(launch=_launch_maxima, plain=maxima_plain)
_by_vectors = kernel_or_plain(launch=_launch_by_vectors, plain=by_vectors_plain, accepts=_takes)
_by_blocks = kernel_or_plain(
    launch=_launch_by_blocks, plain=by_blocks_in_groups_plain, accepts=_takes
)


def maxima_of_groups(
    x: Tensor, groups: Grouped, *, rows: bool, cols: bool
) -> tuple[Tensor | None, Tensor | None]:
    """``max |x|`` of each row, (R,), and of each column of each group, (G C,), in fp32.

    NaN if one of them is. Args as in :func:`quantize_groups`.
    """
    found: tuple[Tensor | None, Tensor | None] = _maxima(x, groups, rows, cols)
    return found


def quantize_groups(
    x: Tensor, groups: Grouped, scaling: GroupScaling, *, rows: bool, cols: bool
) -> Codes:
    """Codes of the rows of groups in the layouts that are wanted.

    Args:
        x: the rows, (R, C) unless they are gathered, in fp32, bf16 or fp16; C is a multiple of 16,
            and of 128 for blocks.
        groups: which rows are those of groups. Blocks need their ends.
        scaling: its scale or amax is (1,), or (G,), one for each group.
        rows, cols: which layouts are wanted.
    """
    by = _by_blocks if isinstance(scaling, BlockScaling) else _by_vectors
    codes: Codes = by(x, groups, scaling, rows, cols)
    return codes

"""Quantization of matrices to fp8, by rows, by columns (the transpose) or both from one read.

Dimensions: R rows, Rp of them with padding, C columns; ``x (R, C)``. Results are :class:`Codes`.
``dtype`` is ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``. A scale s multiplies what is encoded:
the code is ``x s``, rounded to nearest even and saturating at :func:`largest`; NaN stays NaN.
:class:`Codes` hold ``1 / s``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .choice import kernel_or_plain
from .column_sums import sum_columns
from .launch import FP8, Launch, has_fp8
from .quantize_plain import (
    BLOCK,
    BlockScaling,
    Codes,
    MeasuredScaling,
    Scaling,
    TensorScaling,
    amax_plain,
    by_blocks_plain,
    by_squares_plain,
    by_tensor_plain,
    dequantize,
    in_fours,
    largest,
    scale_for,
    transpose_plain,
)
from .tiling import cdiv, rows_of
from .zeros import zero_for

__all__ = [
    "BLOCK",
    "BlockScaling",
    "Codes",
    "MeasuredScaling",
    "ScaleKind",
    "Scaling",
    "TensorScaling",
    "Tile",
    "add_up",
    "amax_of",
    "dequantize",
    "empty_block_scales",
    "empty_codes",
    "empty_sums",
    "in_fours",
    "largest",
    "quantize",
    "quantize_by_squares",
    "scale_and_raised",
    "scale_for",
    "scale_kind",
    "scales_in_fours",
    "transpose_codes",
]


class ScaleKind(NamedTuple):
    """What binaries tell apart of the scales of codes.

    Attributes:
        dtype: of the codes.
        measured: whether the scale of a tensor comes from its amax.
        power_of_two: whether scales that the kernel computes are powers of two.
    """

    dtype: torch.dtype
    measured: bool
    power_of_two: bool

    def constants(self, prefix: str = "") -> dict[str, bool]:
        """Constants of a launch."""
        return {
            f"{prefix}E5M2": self.dtype == torch.float8_e5m2,
            f"{prefix}MEASURED": self.measured,
            f"{prefix}POWER_OF_TWO": self.power_of_two,
        }


def scale_kind(scaling: Scaling) -> ScaleKind:
    """The kind of a scaling."""
    if isinstance(scaling, TensorScaling):
        return ScaleKind(scaling.dtype, False, False)
    return ScaleKind(scaling.dtype, isinstance(scaling, MeasuredScaling), scaling.power_of_two)


def scale_and_raised(
    scaling: TensorScaling | MeasuredScaling,
) -> tuple[Tensor | None, Tensor | None]:
    """What kernels are given: the scale, or the amax that it comes from; and the amax to raise."""
    if isinstance(scaling, MeasuredScaling):
        return scaling.amax, None
    return scaling.scale, scaling.amax


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a program, its warps, and how its threads take them.

    Attributes:
        rows, cols, warps: as the names say.
        group: neighbors along a column that follow one another.
        access: bytes of an operand that a thread reads at once.
    """

    rows: int
    cols: int
    warps: int
    group: int = 1
    access: int = 16

    def launch(
        self,
        function: str,
        constants: dict[str, Any],
        itemsize: int,
        even: bool,
        interleave: int = 0,
    ) -> Launch:
        """The launch of a function for tensors of so many bytes per element.

        Args:
            constants: the first ones; those of tiles come last.
            interleave: columns in one piece, where they are not all.
        """
        access = self.access // itemsize
        tile = {
            "EVEN": even,
            "TILE_ROWS": self.rows,
            "TILE_COLS": self.cols,
            "VEC": math.gcd(access, interleave),
            "GROUP": self.group,
        }
        given = {**constants, **tile}
        return Launch(function, given, num_warps=self.warps)

    def even(self, rows: int, cols: int) -> bool:
        """Whether tiles hold nothing but elements of such a matrix."""
        return rows % BLOCK == 0 and cols % self.cols == 0

    def programs(self, padded: int, cols: int) -> int:
        """How many tiles such a matrix has."""
        return padded // self.rows * cdiv(cols, self.cols)


# Shares are those of a device-to-device copy of as many bytes on an H200.
_BOTH = Tile(128, 64, 4)  # bf16 to both layouts, with amax: 0.90, and 0.88 for 2048 x 3584
_ROWS = Tile(64, 128, 8)  # 0.96 of 28672 x 4096; 32 rows: 0.89
# In blocks to both layouts 0.80 by 4 warps and 0.65 by 8. Those of 4 have up to 168 registers, with
# which three programs fit a multiprocessor; from fp32, and with scales that are no powers of two,
# they spill.
_SQUARE = Tile(BLOCK, BLOCK, 4, group=2)
_SQUARE_BY_MORE = Tile(BLOCK, BLOCK, 8)
_AMAX = {"BLOCK": 4096, "STEPS": 4}  # 0.90 of reading 28672 x 4096, by 16 warps; torch 0.66
_AMAX_LAUNCH = Launch("quantize:amax", _AMAX, num_warps=16)
# Whole cache lines on both sides, 16 bytes to a thread of each row of four; not measured.
_TRANSPOSE = Tile(BLOCK, BLOCK, 8)


@functools.lru_cache(None)
def _tensor_launch(tile: Tile, kind: ScaleKind, itemsize: int, even: bool) -> Launch:
    return tile.launch("quantize:by_tensor", kind.constants(), itemsize, even)


@functools.lru_cache(None)
def _square_launch(
    kernel: str,
    own: tuple[tuple[str, bool], ...],
    dtype: torch.dtype,
    itemsize: int,
    even: bool,
    power_of_two: bool,
) -> Launch:
    constants = {"E5M2": dtype == torch.float8_e5m2, "POWER_OF_TWO": power_of_two, **dict(own)}
    tile = _SQUARE if power_of_two and itemsize == 2 else _SQUARE_BY_MORE
    return tile.launch(f"quantize:{kernel}", constants, itemsize, even)


@functools.lru_cache(None)
def _transpose_launch(even: bool) -> Launch:
    return _TRANSPOSE.launch("quantize:transpose", {}, 1, even)


def _launch_transpose(codes: Tensor) -> Tensor:
    count, features = codes.shape
    made = codes.new_empty((features, count))
    padded = cdiv(count, _TRANSPOSE.rows) * _TRANSPOSE.rows
    even = count == padded and features % _TRANSPOSE.cols == 0
    tensors = (codes.contiguous().view(torch.uint8), made.view(torch.uint8))
    grid = (_TRANSPOSE.programs(padded, features), 1, 1)
    _transpose_launch(even)(grid, tensors, (count, padded, features))
    return made


def _launch_amax(x: Tensor) -> Tensor:
    amax, count = zero_for(x), x.numel()
    _AMAX_LAUNCH((cdiv(count, _AMAX["BLOCK"] * _AMAX["STEPS"]), 1, 1), (x, amax), (count,))
    return amax


def empty_codes(
    x: Tensor, features: int, dtype: torch.dtype, rows: bool, cols: bool
) -> tuple[int, Tensor | None, Tensor | None]:
    """How many rows x has with padding, and memory for codes in the layouts that are wanted."""
    padded = cdiv(x.shape[0], BLOCK) * BLOCK
    by_rows = x.new_empty((padded, features), dtype=dtype) if rows else None
    by_cols = x.new_empty((features, padded), dtype=dtype) if cols else None
    return padded, by_rows, by_cols


def empty_block_scales(
    x: Tensor, features: int, rows: bool, cols: bool, *, square_cols: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Memory for scales of blocks in the layouts that are wanted."""
    blocks = cdiv(x.shape[0], BLOCK)
    of_rows, of_cols = (features // BLOCK, blocks * BLOCK), (blocks, features)
    by_rows = x.new_empty(of_rows, dtype=torch.float32) if rows else None
    if square_cols:
        return by_rows, scales_in_fours(x, features // BLOCK, blocks) if cols else None
    by_cols = x.new_empty(of_cols, dtype=torch.float32) if cols else None
    return by_rows, by_cols


def empty_sums(
    x: Tensor, padded: int, tile: Tile, wanted: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Memory for sums of columns and for those of each tile: the same one for a single tile."""
    if not wanted:
        return None, None
    tiles, features = padded // tile.rows, x.shape[1]
    sums = x.new_empty(features)
    return sums, sums if tiles == 1 else x.new_empty((tiles, features), dtype=torch.float32)


def add_up(sums: Tensor | None, parts: Tensor | None) -> None:
    """Fills in sums of columns from those of each tile."""
    if sums is not None and parts is not None and sums is not parts:
        sum_columns(parts, (sums,), (parts.shape[0],))


def _launch_by_tensor(
    x: Tensor, scaling: TensorScaling | MeasuredScaling, rows: bool, cols: bool, column_sum: bool
) -> Codes:
    count, features = x.shape
    scale, amax = scale_and_raised(scaling)
    assert scale is not None
    tile = _BOTH if cols or column_sum else _ROWS
    padded, by_rows, by_cols = empty_codes(x, features, scaling.dtype, rows, cols)
    inverse = torch.empty_like(scale)
    sums, parts = empty_sums(x, padded, tile, column_sum)
    even = tile.even(count, features)
    launch = _tensor_launch(tile, scale_kind(scaling), x.element_size(), even)
    x, stride = rows_of(x)
    tensors = (x, scale, by_rows, by_cols, inverse, amax, parts)
    launch((tile.programs(padded, features), 1, 1), tensors, (count, padded, features, stride))
    add_up(sums, parts)
    return Codes(by_rows, inverse if rows else None, by_cols, inverse if cols else None, sums)


def _launch_by_blocks(
    x: Tensor, scaling: BlockScaling, rows: bool, cols: bool, column_sum: bool
) -> Codes:
    count, features = x.shape
    dtype, power_of_two, square_cols = scaling
    padded, by_rows, by_cols = empty_codes(x, features, dtype, rows, cols)
    row_scale, col_scale = empty_block_scales(x, features, rows, cols, square_cols=square_cols)
    sums, parts = empty_sums(x, padded, _SQUARE, column_sum)
    even = _SQUARE.even(count, features)
    kind = "by_blocks", (("SQUARE_COLS", square_cols),)
    launch = _square_launch(*kind, dtype, x.element_size(), even, power_of_two)
    x, stride = rows_of(x)
    tensors = (x, by_rows, row_scale, by_cols, col_scale, parts)
    grid = (_SQUARE.programs(padded, features), 1, 1)
    launch(grid, tensors, (count, padded, features, stride))
    add_up(sums, parts)
    return Codes(by_rows, row_scale, by_cols, col_scale, sums)


def _launch_by_squares(
    x: Tensor, dtype: torch.dtype, rows: bool, cols: bool, power_of_two: bool
) -> Codes:
    count, features = x.shape
    padded, by_rows, by_cols = empty_codes(x, features, dtype, rows, cols)
    down, across = padded // BLOCK, features // BLOCK
    row_scale = scales_in_fours(x, down, across) if rows else None
    col_scale = scales_in_fours(x, across, down) if cols else None
    even = _SQUARE.even(count, features)
    launch = _square_launch("by_squares", (), dtype, x.element_size(), even, power_of_two)
    x, stride = rows_of(x)
    tensors = (x, by_rows, row_scale, by_cols, col_scale)
    launch((down * across, 1, 1), tensors, (count, padded, features, stride))
    return Codes(by_rows, row_scale, by_cols, col_scale, None)


def scales_in_fours(x: Tensor, rows: int, cols: int) -> Tensor:
    """Memory for scales of squares, with columns of ones up to a multiple of 4."""
    shape = rows, cdiv(cols, 4) * 4
    make = x.new_empty if shape[1] == cols else x.new_ones
    return make(shape, dtype=torch.float32)


def _takes(x: Tensor, *_: Any) -> bool:
    return x.numel() > 0 and has_fp8(x)


def _takes_side_by_side(x: Tensor) -> bool:
    return x.numel() > 0 and x.is_contiguous()


def _takes_blocks(x: Tensor, *_: Any) -> bool:
    return x.shape[1] % BLOCK == 0 and _takes(x)  # plain torch raises for others


def _takes_words(codes: Tensor) -> bool:
    return codes.numel() > 0 and codes.shape[0] % 4 == 0


_by_tensor = kernel_or_plain(launch=_launch_by_tensor, plain=by_tensor_plain, accepts=_takes)
_by_blocks = kernel_or_plain(launch=_launch_by_blocks, plain=by_blocks_plain, accepts=_takes_blocks)
_by_squares = kernel_or_plain(
    launch=_launch_by_squares, plain=by_squares_plain, accepts=_takes_blocks
)
amax_of = kernel_or_plain(launch=_launch_amax, plain=amax_plain, accepts=_takes_side_by_side)
transpose_codes = kernel_or_plain(
    launch=_launch_transpose, plain=transpose_plain, accepts=_takes_words, dtypes=FP8
)


def quantize(
    x: Tensor, scaling: Scaling, *, rows: bool, cols: bool, column_sum: bool = False
) -> Codes:
    """Codes of x as a scaling, which is not without its scale, says.

    Args:
        x: (R, C) in fp32, bf16 or fp16; of blocks, C is a multiple of 128.
        scaling: one scale, or one for each block.
        rows, cols: which layouts are wanted.
        column_sum: whether sums over the rows of x are wanted, accumulated in fp32.
    """
    by = _by_blocks if isinstance(scaling, BlockScaling) else _by_tensor
    return by(x, scaling, rows, cols, column_sum)


def quantize_by_squares(
    x: Tensor, dtype: torch.dtype, *, rows: bool, cols: bool, power_of_two: bool = True
) -> Codes:
    """Codes of x where every 128 × 128 square has a scale, the same one in both layouts.

    Args as in :func:`quantize` and :func:`scale_for`; C is a multiple of 128.
    """
    return _by_squares(x, dtype, rows, cols, power_of_two)

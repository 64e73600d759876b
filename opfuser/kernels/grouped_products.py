"""Products of fp8 codes of groups of rows, each by a matrix of its own, with scales.

Dimensions: R rows, G groups, P rows where groups are padded, N and K features. Codes, scales and
``ends`` as in :mod:`.groups`. Which kernel: torch's grouped GEMM takes a scale for each row in E4M3
and returns bf16, on GPUs of compute capability 9.0; where groups have few rows, only sums that may
stay in the GPU's 14 bits. The others are opfuser's, for all formats, blocks and results. Both find
the groups on the device.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import torch_internals as internals
from .choice import kernel_or_plain
from .groups_plain import columns_by_columns_plain, rows_by_matrices_plain
from .launch import FP8, Launch, has_fp8
from .quantize import BLOCK
from .tiling import cdiv

# Two operands of 16 KiB, four steps ahead. On an H200 with torch 2.11 and triton 3.6, TFLOP/s of
# gradients of inputs (E5M2 by E4M3) and of weights: 664 and 607 of 128 experts of 2048 x 768 with
# 1024 rows each, 872 and 810 of 8 of 4096 x 14336 with 4096 rows. In blocks, of outputs and inputs
# together and of weights: 541 and 538, and 660 and 690.
_TILE = BLOCK
_SHAPE = {"TILE_ROWS": _TILE, "TILE_COLS": _TILE, "TILE_K": BLOCK, "GROUP": 8}
_HOW = {"num_warps": 8, "num_stages": 4}
# Rows of a group from which torch's grouped GEMM adds up in fp32 (``split``). Measured as above, of
# 128 experts with 1024 rows each, in ms, torch's and opfuser's: gradients of inputs 3.65 and 1.96,
# of weights 4.14 and 2.00; of 32 experts of 7168 x 2048 with 2048 rows 5.8 and 6.6, 6.6 and 7.2.
_TORCH_FROM_ROWS = 2048


@functools.lru_cache(None)
def _rows_launch(blocks: bool, split: bool, groups: int, even: bool) -> Launch:
    lanes = 1 << max(groups - 1, 15).bit_length()
    constants = {"BLOCKS": blocks, "SPLIT": split, "GROUPS": lanes, "EVEN": even, **_SHAPE}
    return Launch("grouped_products:rows_by_matrices", constants, **_HOW)


def _columns_tile(blocks: bool, squares: bool) -> int:
    """Columns of a tile: of 128 with scales along both sides, registers spill on sm_100."""
    return _TILE // 2 if blocks and not squares else _TILE


@functools.lru_cache(None)
def _columns_launch(blocks: bool, squares: bool, split: bool) -> Launch:
    own = {"BLOCKS": blocks, "SQUARES": squares, "SPLIT": split}
    constants = {**own, **_SHAPE, "TILE_COLS": _columns_tile(blocks, squares)}
    return Launch("grouped_products:columns_by_columns", constants, **_HOW)


@functools.lru_cache(None)
def takes_scaled_grouped_mm(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether torch's grouped GEMM takes operands of these dtypes, the last of the result."""
    *operands, result = dtypes
    if set(operands) != {torch.float8_e4m3fn} or result != torch.bfloat16:
        return False
    if internals.scaled_grouped_mm is None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _by_torch(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    ends: Tensor,
    dtype: torch.dtype,
    split: bool,
    out: Tensor | None,
) -> Tensor:
    """``a bᵀ`` of each group, by torch's grouped GEMM."""
    assert internals.scaled_grouped_mm is not None
    how = {"offs": ends, "out_dtype": dtype, "use_fast_accum": not split}
    y = internals.scaled_grouped_mm(a, b.transpose(-2, -1), *scales, **how)
    return y if out is None else out.copy_(y)


def _launch_rows(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    split: bool,
    out: Tensor | None,
) -> Tensor:
    rows, depth = a.shape
    groups, features, _ = b.shape
    blocks = a_scale.dim() == 2
    few = split and rows < _TORCH_FROM_ROWS * groups
    if (
        rows
        and not blocks
        and not few
        and takes_scaled_grouped_mm(a.device, a.dtype, b.dtype, dtype)
    ):
        return _by_torch(a, b, (a_scale, b_scale), ends[0], dtype, split, out)
    out = a.new_empty((rows, features), dtype=dtype) if out is None else out
    strides = b_scale.stride() if blocks else (0, 0, 0)
    ints = (rows, features, depth, groups, *b.stride()[:2], *strides)
    # A group has at most one tile that is not full.
    tiles = (rows // _TILE + groups) * cdiv(features, _TILE)
    launch = _rows_launch(blocks, split, groups, depth % BLOCK == 0)
    launch((tiles, 1, 1), (a, b, a_scale, b_scale, ends, out), ints)
    return out


def _launch_columns(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    split: bool,
    out: Tensor | None,
) -> Tensor:
    (n, padded), k, groups = a.shape, len(b), ends.shape[1]
    blocks = a_scale.dim() == 2
    few = split and padded - BLOCK * groups < _TORCH_FROM_ROWS * groups
    if not blocks and not few and takes_scaled_grouped_mm(a.device, a.dtype, b.dtype, dtype):
        return _by_torch(a, b, (a_scale, b_scale), ends[1], dtype, split, out)
    out = a.new_empty((groups, n, k), dtype=dtype) if out is None else out
    squares = blocks and b_scale.shape[1] != k
    tiles = groups * cdiv(n, _TILE) * cdiv(k, _columns_tile(blocks, squares))
    launch = _columns_launch(blocks, squares, split)
    launch((tiles, 1, 1), (a, b, a_scale, b_scale, ends, out), (n, k, padded, groups))
    return out


def _takes(a: Tensor, *_: object) -> bool:
    return has_fp8(a)


_rows = kernel_or_plain(
    launch=_launch_rows, plain=rows_by_matrices_plain, accepts=_takes, dtypes=FP8
)
_columns = kernel_or_plain(
    launch=_launch_columns, plain=columns_by_columns_plain, accepts=_takes, dtypes=FP8
)


def rows_by_matrices(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    *,
    split: bool,
    out: Tensor | None = None,
) -> Tensor:
    """``y[r] = a[r] b_gᵀ`` for the rows r of group g, (R, N) of ``dtype``.

    Args:
        a: (R, K), codes.
        b: (G, N, K), codes, with consecutive elements along K.
        a_scale: (R,); or (K / 128, R), of blocks.
        b_scale: (G, N); or (G, N / 128, K / 128), of squares.
        ends: of ``groups.group_ends``.
        dtype: of the result.
        split: whether to accumulate in fp32 after every 128 products.
        out: where to write the result, of ``dtype``.
    """
    y: Tensor = _rows(a, b, a_scale, b_scale, ends, dtype, split, out)
    return y


def columns_by_columns(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    *,
    split: bool,
    out: Tensor | None = None,
) -> Tensor:
    """``y_g = a_g b_gᵀ`` for the columns of each group, (G, N, K) of ``dtype``.

    Args:
        a: (N, P), codes.
        b: (K, P), codes.
        a_scale: (G N,); or (P / 128, N), of blocks.
        b_scale: (G K,); or (P / 128, K), of blocks; or (K / 128, up4(P / 128)), of squares.
        ends: of ``groups.group_ends``.
        dtype: of the result.
        split: whether to accumulate in fp32 after every 128 products.
        out: where to write the result, of ``dtype``.
    """
    y: Tensor = _columns(a, b, a_scale, b_scale, ends, dtype, split, out)
    return y

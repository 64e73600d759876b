"""What is launched for the norms of rows, by which rule, and with which memory.

Dimensions as in ``norm``: R rows, D columns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .column_sums import sum_columns
from .launch import Launch, multiprocessors
from .tiling import cdiv

__all__ = ["MAX_CHAIN_ROW", "MAX_COLS", "backward", "chain_forward_launch", "forward"]

# Longer rows are left to plain torch.
MAX_COLS = 2**16

# Shares below are those of a device-to-device copy that an H200 reached in bf16.

# Elements of each tensor that a thread holds. In forward, rows of 2048 to 4096 reach 0.97 to 0.98
# with 16 and 0.90 to 0.97 with 8, as the sums over a row then take longer than its loads. Where no
# residual is loaded too, longer rows do better with 32: 8192 x 5120 takes 46 instead of 52 us. So
# do those of LayerNorm from 2048 on, which has two sums, one after the other: 0.89 to 0.94 instead
# of 0.73 to 0.89; two rows at a time, by 8 warps, take 36.2 instead of 36.9 us for 8192 x 4096 and
# 135 instead of 140 us for 16384 x 8192. In backward, more than 16 do not fit. Rows that would
# leave some of four warps idle share a program; a program has 16 warps at most, with 32 it waits
# longer.
ELEMENTS, MANY_ELEMENTS, LAYER_COLS, LONG_COLS = 16, 32, 2**11, 2**12 + 1
LAYER_PAIRS, PAIR_WARPS = (2**12, 2**13), 8
MIN_WARPS, MAX_WARPS = 4, 16

# Longer rows are read twice, the second time from the cache: held in registers they are spilled.
# In parts of BLOCK_COLS, rows of 16384 reach 0.94 instead of 0.97 in forward, 1.00 in backward.
MAX_COLS_FORWARD, MAX_COLS_BACKWARD = 2**14, 2**13
BLOCK_COLS, BLOCK_WARPS = 2**13, 32

# Bytes of a row after a chain of stages: with twice as many, bias, dropout, sum and LayerNorm spill
# 40 bytes on sm_100, and six sums, dropout and LayerNorm 272 on sm_80; up to that neither does.
MAX_CHAIN_ROW = 2**15

# Backward keeps dw, db and w of each column in registers, and has only 16 warps per multiprocessor
# for it. As each waits for sums over its row, the next rows are fetched while one is worked on:
# 0.96 to 0.99 with two ahead, 0.82 to 0.96 with one. Of rows with more than LONG_ROW bytes, one: an
# A100 has 163 KiB to keep them. Where y is written too, fewer rows at a time do better: 0.94 to
# 0.99 with 8 warps, 0.86 to 0.93 with 16.
BACKWARD_WARPS, BACKWARD_WARPS_WITH_Y = 16, 8
STAGES, LONG_STAGES, LONG_ROW = 3, 2, 2**14

# Columns of a program that sums dw without dx.
BLOCK_COLS_OF_DW = 2**11


@functools.cache
def _forward_launch(
    cols: int, zero_centered: bool, with_mean: bool, alone: bool
) -> tuple[Launch, int]:
    """The launch, without a residual if ``alone``, and the rows of a program."""
    if cols > MAX_COLS_FORWARD:
        return _wide_launch("norm:norm_forward_wide", zero_centered), 1
    many = alone and cols >= (LAYER_COLS if with_mean else LONG_COLS)
    rows, block_cols, warps = _tile(cols, MANY_ELEMENTS if many else ELEMENTS)
    if many and with_mean and block_cols in LAYER_PAIRS:
        rows, warps = 2, PAIR_WARPS
    constants = {"ZERO_CENTERED": zero_centered, "BLOCK_ROWS": rows, "BLOCK_COLS": block_cols}
    return Launch("norm:norm_forward", constants, num_warps=warps), rows


def chain_forward_launch(
    stages: tuple[Any, ...], cols: int, zero_centered: bool
) -> tuple[Launch, int]:
    """The launch for a norm after a chain of stages, and the rows of a program."""
    # Random numbers come in fours and eights.
    rows, block_cols, warps = _tile(max(8, cols), ELEMENTS)
    constants = {
        "STAGES": stages,
        "ZERO_CENTERED": zero_centered,
        "BLOCK_ROWS": rows,
        "BLOCK_COLS": block_cols,
    }
    return Launch("norm:chain_norm_forward", constants, num_warps=warps), rows


@functools.cache
def _backward_launch(cols: int, itemsize: int, zero_centered: bool) -> tuple[Launch, int]:
    """The launch, and the rows of a program at a time."""
    rows, block_cols, warps = _tile(cols, ELEMENTS)
    constants = {
        "ZERO_CENTERED": zero_centered,
        "BLOCK_ROWS": rows,
        "BLOCK_COLS": block_cols,
        "STAGES": STAGES if block_cols * itemsize <= LONG_ROW else LONG_STAGES,
    }
    return Launch("norm:norm_backward", constants, num_warps=warps), rows


@functools.cache
def _wide_backward_launch(zero_centered: bool) -> Launch:
    return _wide_launch("norm:norm_backward_wide", zero_centered)


def _tile(cols: int, elements: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program that holds whole rows, so many elements per thread."""
    cols = 1 << (cols - 1).bit_length()
    rows = max(1, 32 * MIN_WARPS * elements // cols)
    return rows, cols, min(MAX_WARPS, rows * cols // (32 * elements))


def _wide_launch(function: str, zero_centered: bool) -> Launch:
    constants = {"ZERO_CENTERED": zero_centered, "BLOCK_COLS": BLOCK_COLS}
    return Launch(function, constants, num_warps=BLOCK_WARPS)


def _share(weight: Tensor | None, cols: int) -> float:
    """What a sum over a row counts: 1/D of it, all of it for L2 normalisation."""
    return 1.0 if weight is None else 1 / cols


def _row_stride(x: Tensor | None) -> int:
    if x is None:
        return 0
    row, col = x.stride()
    if col != 1 and x.shape[1] != 1:
        raise ValueError(
            "Kernels of norms take tensors with the elements of a row side by side, but received "
            f"strides {(row, col)}. Pass x.contiguous()."
        )
    return row


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    with_mean: bool,
) -> tuple[Tensor, Any, Any, Tensor]:
    """Returns y, x + residual or None, mean or None, rstd. Without a weight: L2 normalisation.

    Raises:
        ValueError: the elements of a row are not side by side.
    """
    rows, cols = x.shape
    strides = (_row_stride(x), _row_stride(residual))
    # Integers are unpacked faster than a tuple, and x.new_empty needs no device.
    y = x.new_empty(rows, cols)
    total = None if residual is None else torch.empty_like(y)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if with_mean else None
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    launch, block_rows = _forward_launch(cols, zero_centered, with_mean, residual is None)
    launch(
        (cdiv(rows, block_rows), 1, 1),
        (x, residual, weight, bias, y, total, mean, rstd),
        (rows, cols, *strides),
        (eps, _share(weight, cols)),
    )
    return y, total, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    zero_centered: bool,
    wants: tuple[bool, bool, bool],
) -> list[Tensor]:
    """Returns dx, dw, db and y, those that are wanted; db where there is a bias.

    Raises:
        ValueError: the elements of a row are not side by side.
    """
    want_dx, want_dw, want_y = wants
    if not want_dx:
        residual_grad = None
    rows, cols = x.shape
    ints = (rows, cols, _row_stride(dy), _row_stride(x), _row_stride(residual_grad))
    dx = x.new_empty(rows, cols) if want_dx else None
    if residual_grad is not None and residual_grad.dtype != x.dtype:
        dtype = torch.promote_types(x.dtype, residual_grad.dtype)
        dx = x.new_empty(rows, cols, dtype=dtype)
    y = x.new_empty(rows, cols) if want_y else None
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    mean = None if mean is None else mean.contiguous()
    tensors = (dy, x, weight, bias, mean, rstd.contiguous(), residual_grad, dx, y)
    grads: list[Tensor] = []
    if want_dx and cols > MAX_COLS_BACKWARD:
        launch = _wide_backward_launch(zero_centered)
        launch((rows, 1, 1), tensors, ints, (_share(weight, cols),))
        if want_dw:
            alone = (*tensors[:6], None, None, None)
            grads = _in_registers(alone, ints, zero_centered, True)
    else:
        grads = _in_registers(tensors, ints, zero_centered, want_dw)
    results = grads if dx is None else [dx, *grads]
    if y is not None:
        results.append(y)
    return results


def _in_registers(
    tensors: tuple[Tensor | None, ...],
    ints: tuple[int, ...],
    zero_centered: bool,
    want_dw: bool,
) -> list[Tensor]:
    """Fills in dx and y where they are given; returns dw and db where they are wanted."""
    rows, cols, *_ = ints
    block_cols = cols if cols <= MAX_COLS_BACKWARD else BLOCK_COLS_OF_DW
    blocks = cdiv(cols, block_cols)
    x, weight, bias = tensors[1:4]
    assert x is not None
    launch, block_rows = _backward_launch(block_cols, x.element_size(), zero_centered)
    warps = BACKWARD_WARPS if tensors[-1] is None else BACKWARD_WARPS_WITH_Y
    resident = multiprocessors(x) * max(1, warps // launch.num_warps)
    programs = min(cdiv(rows, block_rows), max(1, resident // blocks))
    grads: list[Tensor] = []
    if want_dw and weight is not None:
        grads.append(weight.new_empty(cols))
        if bias is not None:
            grads.append(bias.new_empty(cols))
    partial = None
    if grads:
        partial = x.new_empty(len(grads), programs, cols, dtype=torch.float32)
    launch((programs, blocks, 1), (*tensors, partial), ints, (_share(weight, cols),))
    if partial is not None:
        sum_columns(partial, grads, (programs,) * len(grads))
    return grads

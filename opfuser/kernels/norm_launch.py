"""What is launched for the norms of rows, by which rule, and with which memory.

Dimensions as in ``norm``: R rows, D columns. Shares in comments are those of a device-to-device
copy that an H200 reached in bf16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.recording import watching
from .column_sums import sum_columns
from .launch import Launch, multiprocessors
from .norm_plain import NormForward, NormGrads
from .tiling import cdiv, empty_contiguous

_Y_WEIGHT = 7  # its position in launches of backward

# Longer rows are left to plain torch.
MAX_COLS = 2**16

# Bytes of a row after a chain of stages: with twice as many, bias, dropout, sum and LayerNorm spill
# 40 bytes on sm_100, and six sums, dropout and LayerNorm 272 on sm_80; up to that neither does.
MAX_CHAIN_ROW = 2**15


class RowLaunch(NamedTuple):
    """A launch, and how many rows a program of it holds at a time."""

    launch: Launch
    block_rows: int


class Tile(NamedTuple):
    """Rows and columns that a program holds at a time, and its warps."""

    rows: int
    cols: int
    warps: int


@dataclass(frozen=True)
class WholeRows:
    """Programs that hold whole rows in registers, in both passes."""

    # Elements of each tensor that a thread holds. In forward, rows of 2048 to 4096 reach 0.97 to
    # 0.98 with 16 and 0.90 to 0.97 with 8, as the sums over a row then take longer than its loads.
    # In backward, more than 16 do not fit.
    elements: int = 16
    # Rows that would leave some of four warps idle share a program.
    min_warps: int = 4
    # With 32 warps a program waits longer.
    max_warps: int = 16

    def tile(self, cols: int, elements: int) -> Tile:
        """The tile for rows of ``cols`` columns, with so many elements per thread."""
        cols = 1 << (cols - 1).bit_length()
        rows = max(1, 32 * self.min_warps * elements // cols)
        return Tile(rows, cols, min(self.max_warps, rows * cols // (32 * elements)))


@dataclass(frozen=True)
class ForwardRule:
    """What forward does besides that."""

    # Longer rows are read twice, the second time from the cache: held in registers they are
    # spilled. In parts of WideRule.block_cols, rows of 16384 reach 0.94 instead of 0.97.
    max_cols: int = 2**14
    # Where no residual is loaded too, rows from these columns on do better with more elements per
    # thread: 8192 x 5120 takes 46 instead of 52 us. So do those of LayerNorm from fewer columns on,
    # which has two sums, one after the other: 0.89 to 0.94 instead of 0.73 to 0.89.
    many_elements: int = 32
    many_from: int = 2**12 + 1
    many_from_with_mean: int = 2**11
    # Tiles of so many columns then do better with two rows, by 8 warps: with LayerNorm 36.2 instead
    # of 36.9 us for 8192 x 4096 and 135 instead of 140 us for 16384 x 8192.
    paired_cols: tuple[int, ...] = (2**12, 2**13)
    paired_warps: int = 8


@dataclass(frozen=True)
class BackwardRule:
    """What backward does besides that."""

    # As in forward; in parts of WideRule.block_cols, rows of 16384 reach 1.00.
    max_cols: int = 2**13
    # dw, db and w of each column are kept in registers, so that a multiprocessor has only so many
    # warps for it. Where y is written too, fewer rows at a time do better: 0.94 to 0.99 with 8
    # warps, 0.86 to 0.93 with 16.
    warps: int = 16
    warps_with_y: int = 8
    # As each of these waits for sums over its row, the next rows are fetched while one is worked
    # on: 0.96 to 0.99 with two ahead, 0.82 to 0.96 with one. Of rows with more bytes than
    # ``long_row``, one: an A100 has 163 KiB to keep them.
    num_stages: int = 3
    num_stages_of_long_rows: int = 2
    long_row: int = 2**14
    # Columns of a program that sums dw without dx.
    block_cols_of_dw: int = 2**11


@dataclass(frozen=True)
class WideRule:
    """Programs that take a row of more columns than registers hold, part by part."""

    block_cols: int = 2**13
    warps: int = 32

    def launch(
        self, function: str, zero_centered: bool, *, only_reads: int | None = None
    ) -> Launch:
        constants = {"ZERO_CENTERED": zero_centered, "BLOCK_COLS": self.block_cols}
        return Launch(function, constants, num_warps=self.warps, only_reads=only_reads)


WHOLE_ROWS = WholeRows()
FORWARD = ForwardRule()
BACKWARD = BackwardRule()
WIDE = WideRule()


def forward_tile(cols: int, with_mean: bool, alone: bool) -> Tile:
    """The tile of whole rows in forward; ``alone``: without a residual."""
    many = alone and cols >= (FORWARD.many_from_with_mean if with_mean else FORWARD.many_from)
    return WHOLE_ROWS.tile(cols, FORWARD.many_elements if many else WHOLE_ROWS.elements)


@functools.cache
def _forward_launch(cols: int, zero_centered: bool, with_mean: bool, alone: bool) -> RowLaunch:
    if cols > FORWARD.max_cols:
        return RowLaunch(WIDE.launch("norm:norm_forward_wide", zero_centered), 1)
    rows, block_cols, warps = forward_tile(cols, with_mean, alone)
    if alone and with_mean and block_cols in FORWARD.paired_cols:
        rows, warps = 2, FORWARD.paired_warps
    constants = {"ZERO_CENTERED": zero_centered, "BLOCK_ROWS": rows, "BLOCK_COLS": block_cols}
    return RowLaunch(Launch("norm:norm_forward", constants, num_warps=warps), rows)


def chain_forward_launch(stages: tuple[Any, ...], cols: int, zero_centered: bool) -> RowLaunch:
    """The launch of a norm after a chain of stages."""
    # Random numbers come in fours and eights.
    rows, block_cols, warps = WHOLE_ROWS.tile(max(8, cols), WHOLE_ROWS.elements)
    constants = {
        "STAGES": stages,
        "ZERO_CENTERED": zero_centered,
        "BLOCK_ROWS": rows,
        "BLOCK_COLS": block_cols,
    }
    return RowLaunch(Launch("norm:chain_norm_forward", constants, num_warps=warps), rows)


@functools.cache
def _backward_launch(cols: int, itemsize: int, zero_centered: bool) -> RowLaunch:
    rows, block_cols, warps = WHOLE_ROWS.tile(cols, WHOLE_ROWS.elements)
    is_long = block_cols * itemsize > BACKWARD.long_row
    constants = {
        "ZERO_CENTERED": zero_centered,
        "BLOCK_ROWS": rows,
        "BLOCK_COLS": block_cols,
        "NUM_STAGES": BACKWARD.num_stages_of_long_rows if is_long else BACKWARD.num_stages,
    }
    launch = Launch("norm:norm_backward", constants, num_warps=warps, only_reads=_Y_WEIGHT)
    return RowLaunch(launch, rows)


@functools.cache
def _wide_backward_launch(zero_centered: bool) -> Launch:
    return WIDE.launch("norm:norm_backward_wide", zero_centered, only_reads=_Y_WEIGHT)


def share_of_sum(weight: Tensor | None, cols: int) -> float:
    """What a sum over a row counts: 1/D of it, all of it for L2 normalisation."""
    return 1.0 if weight is None else 1 / cols


def strided_rows(x: Tensor) -> tuple[Tensor, int]:
    """``x`` with its rows at one distance, and that distance."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.dim() != 2:
        x = x.flatten(0, -2)
    row, col = x.stride()
    if col != 1 and x.shape[1] != 1:
        raise ValueError(
            "Kernels of norms take tensors with the elements of a row side by side, but received "
            f"strides {(row, col)}. Pass x.contiguous()."
        )
    return x, row


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    with_mean: bool,
) -> NormForward:
    """As ``norm_plain.norm_forward``.

    Raises:
        ValueError: the elements of a row are not side by side.
    """
    cols = x.shape[-1]
    y = empty_contiguous(x)
    total = None if residual is None else torch.empty_like(y)
    # Integers are unpacked in half the time that a torch.Size takes, but there must be one.
    rstd = x.new_empty(*x.shape[:-1] or ((),), dtype=torch.float32)
    x, stride = strided_rows(x)
    residual, residual_stride = (None, 0) if residual is None else strided_rows(residual)
    rows = rstd.numel()
    mean = torch.empty_like(rstd) if with_mean else None
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    launch, block_rows = _forward_launch(cols, zero_centered, with_mean, residual is None)
    launch(
        (cdiv(rows, block_rows), 1, 1),
        (x, residual, weight, bias, y, total, mean, rstd),
        (rows, cols, stride, residual_stride),
        (eps, share_of_sum(weight, cols)),
    )
    return NormForward(y, total, mean, rstd)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    eps: float,
    zero_centered: bool,
    want_dx: bool,
    want_dw: bool,
    want_y: bool,
    y_weight: Tensor | None = None,
) -> NormGrads:
    """As ``norm_plain.norm_backward``.

    Raises:
        ValueError: the elements of a row are not side by side.
    """
    if not want_dx:
        residual_grad = None
    rows, cols = rstd.numel(), x.shape[-1]
    dx = empty_contiguous(x) if want_dx else None
    if residual_grad is not None and residual_grad.dtype != x.dtype:
        dtype = torch.promote_types(x.dtype, residual_grad.dtype)
        dx = empty_contiguous(x, dtype)
    y = empty_contiguous(x) if want_y else None
    dy, dy_stride = strided_rows(dy)
    x, x_stride = strided_rows(x)
    residual_stride = 0
    if residual_grad is not None:
        residual_grad, residual_stride = strided_rows(residual_grad)
    ints = (rows, cols, dy_stride, x_stride, residual_stride)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    dw = torch.empty_like(weight) if want_dw and weight is not None else None
    db = torch.empty_like(bias) if want_dw and bias is not None else None
    mean = None if mean is None else mean.contiguous()
    y_weight = _other_weight(weight, y_weight) if want_y else None
    tensors = (dy, x, weight, bias, mean, rstd.contiguous(), residual_grad, y_weight, dx, y)
    if dx is None or cols <= BACKWARD.max_cols:
        _launch_with_sums(tensors, ints, zero_centered, dw, db)
    else:
        launch = _wide_backward_launch(zero_centered)
        launch((rows, 1, 1), tensors, ints, (share_of_sum(weight, cols),))
        if dw is not None:
            _launch_with_sums((*tensors[:6], *(None,) * 4), ints, zero_centered, dw, db)
    return NormGrads(dx, dw, db, y)


def _other_weight(weight: Tensor | None, y_weight: Tensor | None) -> Tensor | None:
    """The weight of y; None if it is that of dx, which takes fewer registers."""
    if weight is None or y_weight is None:
        return None
    y_weight = y_weight.contiguous()
    # Calls that repeat those of this one may be given two.
    if watching.watcher is None and y_weight.data_ptr() == weight.data_ptr():
        return None
    return y_weight


def _launch_with_sums(
    tensors: tuple[Tensor | None, ...],
    ints: tuple[int, ...],
    zero_centered: bool,
    dw: Tensor | None,
    db: Tensor | None,
) -> None:
    """Fills in dx and y, the last two of the tensors, and dw and db, where they are given."""
    rows, cols, *_ = ints
    x, weight = tensors[1:3]
    assert x is not None
    with_y = tensors[-1] is not None
    how = rows, cols, x.element_size(), zero_centered, with_y, multiprocessors(x)
    launch, programs, blocks = _sums_launch(*how)
    sums = [grad for grad in (dw, db) if grad is not None]
    partial = None
    if sums:
        partial = x.new_empty(len(sums), programs, cols, dtype=torch.float32)
    launch((programs, blocks, 1), (*tensors, partial), ints, (share_of_sum(weight, cols),))
    if partial is not None:
        sum_columns(partial, sums, (programs,) * len(sums))


@functools.lru_cache(2**10)
def _sums_launch(
    rows: int, cols: int, itemsize: int, zero_centered: bool, with_y: bool, multiprocessors: int
) -> tuple[Launch, int, int]:
    """The launch, the programs that share the rows, and the blocks of columns."""
    # Without dx a program need not hold whole rows.
    block_cols = cols if cols <= BACKWARD.max_cols else BACKWARD.block_cols_of_dw
    blocks = cdiv(cols, block_cols)
    launch, block_rows = _backward_launch(block_cols, itemsize, zero_centered)
    warps = BACKWARD.warps_with_y if with_y else BACKWARD.warps
    resident = multiprocessors * max(1, warps // launch.num_warps)
    return launch, min(cdiv(rows, block_rows), max(1, resident // blocks)), blocks

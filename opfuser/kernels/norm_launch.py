"""What is launched for the norms of rows, by which rule, and with which memory.

Dimensions as in ``norm``: R rows, D columns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .launch import Launch, multiprocessors

__all__ = ["MAX_COLS", "backward", "forward"]

# Longer rows are left to plain torch.
MAX_COLS = 2**16

# Longer rows are read twice, the second time from the cache: held in registers they are spilled.
MAX_COLS_IN_REGISTERS = 2**13

# 16 bytes of fp16 or bf16, at which a copy is fastest: 16 elements lose up to 3 %, 32 lose 5 %.
# Rows that would leave some of four warps idle share a program.
ELEMENTS_PER_THREAD = 8
MIN_WARPS = 4

# Backward keeps dw, db and w of each column in registers. For RMSNorm, 8 elements per thread leave
# a multiprocessor room for 32 warps; for LayerNorm, and where several rows share a program, 16
# take all of the 128 registers with which 16 warps fit.
LEAN_ELEMENTS, LEAN_WARPS = 8, 32
FULL_ELEMENTS, FULL_WARPS = 16, 16

# As warps are few in backward, and each waits for sums over its row, the next row is fetched while
# one is worked on; likewise the next columns of a row that is worked on in parts.
STAGES = 2
BLOCK_COLS = 2**12

# Columns of a program that sums dw without dx.
BLOCK_COLS_OF_DW = 2**11

# Partial sums that a program of the reduction reads at a time.
SUM_ROWS, SUM_COLS, SUM_WARPS = 128, 32, 8


@functools.cache
def _forward_launch(cols: int, zero_centered: bool) -> tuple[Launch, int]:
    """The launch, and the rows of a program."""
    if cols > MAX_COLS_IN_REGISTERS:
        return _wide_launch("norm:norm_forward_wide", zero_centered), 1
    rows, block_cols, warps = _tile(cols, ELEMENTS_PER_THREAD)
    constants = {"ZERO_CENTERED": zero_centered, "BLOCK_ROWS": rows, "BLOCK_COLS": block_cols}
    return Launch("norm:norm_forward", constants, num_warps=warps), rows


@functools.cache
def _backward_launch(cols: int, zero_centered: bool, layer: bool) -> tuple[Launch, int, int]:
    """The launch, the rows of a program at a time, and programs per multiprocessor."""
    lean = not layer and cols > 32 * MIN_WARPS * LEAN_ELEMENTS // 2
    rows, block_cols, warps = _tile(cols, LEAN_ELEMENTS if lean else FULL_ELEMENTS)
    constants = {
        "ZERO_CENTERED": zero_centered,
        "BLOCK_ROWS": rows,
        "BLOCK_COLS": block_cols,
        "STAGES": STAGES,
    }
    launch = Launch("norm:norm_backward", constants, num_warps=warps)
    return launch, rows, max(1, (LEAN_WARPS if lean else FULL_WARPS) // warps)


@functools.cache
def _wide_backward_launch(zero_centered: bool) -> Launch:
    return _wide_launch("norm:norm_backward_wide", zero_centered)


@functools.cache
def _sum_launch() -> tuple[Launch, int]:
    """The launch, and the columns of a program."""
    constants = {"BLOCK_ROWS": SUM_ROWS, "BLOCK_COLS": SUM_COLS}
    return Launch("norm:sum_partials", constants, num_warps=SUM_WARPS), SUM_COLS


def _tile(cols: int, elements: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program that holds whole rows, so many elements per thread."""
    cols = 1 << (cols - 1).bit_length()
    rows = max(1, 32 * MIN_WARPS * elements // cols)
    return rows, cols, rows * cols // (32 * elements)


def _wide_launch(function: str, zero_centered: bool) -> Launch:
    constants = {"ZERO_CENTERED": zero_centered, "BLOCK_COLS": BLOCK_COLS, "STAGES": STAGES}
    return Launch(function, constants, num_warps=BLOCK_COLS // (32 * ELEMENTS_PER_THREAD))


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
    y = x.new_empty((rows, cols))
    total = None if residual is None else torch.empty_like(y)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if with_mean else None
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    launch, block_rows = _forward_launch(cols, zero_centered)
    launch(
        (-(-rows // block_rows), 1, 1),
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
    dtype = x.dtype
    if residual_grad is not None and residual_grad.dtype != dtype:
        dtype = torch.promote_types(dtype, residual_grad.dtype)
    dx = torch.empty((rows, cols), dtype=dtype, device=x.device) if want_dx else None
    y = x.new_empty((rows, cols)) if want_y else None
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    mean = None if mean is None else mean.contiguous()
    tensors = (dy, x, weight, bias, mean, rstd.contiguous(), residual_grad, dx, y)
    grads: list[Tensor] = []
    if want_dx and cols > MAX_COLS_IN_REGISTERS:
        launch = _wide_backward_launch(zero_centered)
        launch((rows, 1, 1), tensors, ints, (_share(weight, cols),))
        if want_dw:
            alone = (*tensors[:6], None, None, None)
            grads = _in_registers(alone, ints, zero_centered, True)
    else:
        grads = _in_registers(tensors, ints, zero_centered, want_dw)
    results = [dx, *grads, y]
    return [result for result in results if result is not None]


def _in_registers(
    tensors: tuple[Tensor | None, ...],
    ints: tuple[int, ...],
    zero_centered: bool,
    want_dw: bool,
) -> list[Tensor]:
    """Fills in dx and y where they are given; returns dw and db where they are wanted."""
    rows, cols, *_ = ints
    block_cols = cols if cols <= MAX_COLS_IN_REGISTERS else BLOCK_COLS_OF_DW
    blocks = -(-cols // block_cols)
    x, weight, bias, mean = tensors[1:5]
    layer = mean is not None
    launch, block_rows, resident = _backward_launch(block_cols, zero_centered, layer)
    assert x is not None
    programs = min(-(-rows // block_rows), max(1, multiprocessors(x) * resident // blocks))
    parameters = [p for p in (weight, bias) if p is not None and want_dw]
    partial = None
    if parameters:
        size = (len(parameters), programs, cols)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    launch((programs, blocks, 1), (*tensors, partial), ints, (_share(weight, cols),))
    grads = [torch.empty_like(p) for p in parameters]
    if partial is not None:
        dw, db = (*grads, None)[:2]
        launch, block_cols = _sum_launch()
        launch((-(-cols // block_cols), len(grads), 1), (partial, dw, db), (programs, cols))
    return grads

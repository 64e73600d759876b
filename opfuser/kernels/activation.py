"""Element-wise activations, with the bias before them: forward and backward.

Dimensions: R rows, C columns; ``x``, ``dy`` and results ``(…, C)``, bias and its gradient ``(C,)``.
A function is given by its name and parameters, see ``ScalarFunction.arguments``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import DTYPES, Launch, multiprocessors
from .operators import operator
from .rows import add_up, cdiv, empty_rows, row_blocks, rows_of, tile
from .scalar import BLOCK, ScalarFunction, cast, scalar_function, wide_dtype

__all__ = [
    "Parameters",
    "activation_backward",
    "activation_forward",
    "in_blocks",
    "rows_per_block",
]

Parameters = Sequence[float]

# Bytes of one operand per program of 4 warps: one access of 16 bytes by each thread where elements
# are all alike, two where a bias is to be added. On an H200 that is 0.98 and 0.92 of a copy; a bias
# and one access, 0.79.
_BYTES = 2048
_ROW_BYTES = 4096
_WARPS = 4

# Sums of columns: tiles of 128 columns, and at least 96 rows per partial sum, which makes partial
# sums 1.4% of the traffic. Programs per multiprocessor, and tiles that are fetched ahead: 0.92 of a
# copy for bias, GELU, y and db of 16384 columns; with 8 programs 0.89, with one tile ahead 0.80.
_SUM_COLS = 128
_SUM_ROWS = 96
_SUM_PROGRAMS = 16
_SUM_STAGES = 3

# From so many blocks on, one thread takes 4.4 instead of 21.6 ms for ReLU and bias of 4096 x 2048
# in bf16, 7.9 instead of 24.4 ms for SiLU; below, blocks gain nothing.
_MIN_BLOCKS = 8


class _Rows(NamedTuple):
    launch: Launch
    block_rows: int
    block_cols: int


@functools.lru_cache(None)
def _flat(kernel: str, function: str, parameters: Parameters, itemsize: int) -> tuple[Launch, int]:
    block = _BYTES // itemsize
    constants = {"F": f"@scalar:{function}", "P": parameters, "BLOCK": block}
    return Launch(f"activation:{kernel}", constants, num_warps=_WARPS), block


@functools.lru_cache(None)
def _rows(
    kernel: str, function: str, parameters: Parameters, itemsize: int, cols: int, sums: bool
) -> _Rows:
    elements = _ROW_BYTES // itemsize
    block_rows, block_cols = tile(min(cols, _SUM_COLS) if sums else cols, elements)
    constants = {
        "F": f"@scalar:{function}",
        "P": parameters,
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
    }
    if kernel == "backward_rows":
        constants["STAGES"] = _SUM_STAGES if sums else 1
    launch = Launch(f"activation:{kernel}", constants, num_warps=_WARPS)
    return _Rows(launch, block_rows, block_cols)


def _forward_launch(
    x: Tensor, function: str, parameters: Parameters, bias: Tensor | None
) -> Tensor:
    y = empty_rows(x)
    parameters = tuple(parameters)
    if bias is None and x.is_contiguous():
        size = x.numel()
        launch, block = _flat("forward_flat", function, parameters, x.element_size())
        launch((cdiv(size, block), 1, 1), (x, y), (size,))
        return y
    rows, cols = y.shape[:-1].numel(), y.shape[-1]
    x, stride = rows_of(x)
    plan = _rows("forward_rows", function, parameters, x.element_size(), cols, False)
    grid = cdiv(rows, plan.block_rows) * cdiv(cols, plan.block_cols)
    plan.launch((grid, 1, 1), (x, _operand(bias, x), y), (rows, cols, stride))
    return y


def _operand(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    """``tensor`` in a dtype that kernels read."""
    return tensor if tensor is None or tensor.dtype in DTYPES else tensor.to(x.dtype)


def _backward_launch(
    dy: Tensor,
    x: Tensor,
    function: str,
    parameters: Parameters,
    bias: Tensor | None,
    want_dx: bool,
    want_db: bool,
    want_y: bool,
) -> list[Tensor]:
    if x.dtype not in DTYPES:
        return _backward_plain(dy, x, function, parameters, bias, want_dx, want_db, want_y)
    parameters = tuple(parameters)
    dx = empty_rows(x) if want_dx else None
    y = empty_rows(x) if want_y else None
    flat = bias is None and dx is not None and not want_db
    if flat and x.is_contiguous() and dy.is_contiguous():
        size = x.numel()
        launch, block = _flat("backward_flat", function, parameters, x.element_size())
        launch((cdiv(size, block), 1, 1), (dy, x, dx, y), (size,))
        return [t for t in (dx, y) if t is not None]
    rows, cols = x.shape[:-1].numel(), x.shape[-1]
    db = None
    if want_db:
        dtype = x.dtype if bias is None else bias.dtype
        db = x.new_empty(cols, dtype=dtype)
    plan = _rows("backward_rows", function, parameters, x.element_size(), cols, want_db)
    blocks = cdiv(cols, plan.block_cols)
    slices = cdiv(rows, plan.block_rows)
    if want_db:
        programs = multiprocessors(x) * _SUM_PROGRAMS
        least = max(_SUM_ROWS, plan.block_rows)
        slices = max(1, min(cdiv(rows, least), round(programs / max(1, blocks))))
    parts = db
    if want_db and slices > 1:
        parts = x.new_empty((slices, cols), dtype=torch.float32)
    x, x_stride = rows_of(x)
    dy, dy_stride = rows_of(dy)
    tensors = (dy, x, _operand(bias, x), dx, y, parts)
    ints = (rows, cols, dy_stride, x_stride, slices)
    plan.launch((blocks * slices, 1, 1), tensors, ints)
    if parts is not None and db is not None and parts is not db:
        add_up(parts, (db,), (slices,))
    return [t for t in (dx, db, y) if t is not None]


def _forward_plain(x: Tensor, function: str, parameters: Parameters, bias: Tensor | None) -> Tensor:
    """``y = f(x + b)``, contiguous, in the dtype of x; no bias counts as zero."""
    f, x = scalar_function(function, parameters), x.contiguous()
    if bias is None:
        return cast(f.value(x), x.dtype)  # autocast runs some in fp32
    wide = wide_dtype(x.dtype)
    b, y = cast(bias, wide), empty_rows(x)
    for x_rows, y_rows in row_blocks(x, y):
        z = cast(x_rows, wide) + b
        if z.dtype == y.dtype and not torch.compiler.is_compiling():
            f.value(z, out=y_rows)
        else:
            y_rows.copy_(f.value(z))
    return y


def _backward_plain(
    dy: Tensor,
    x: Tensor,
    function: str,
    parameters: Parameters,
    bias: Tensor | None,
    want_dx: bool,
    want_db: bool,
    want_y: bool,
) -> list[Tensor]:
    """Those wanted of ``dx = dy f'(x + b)``, ``db = Σ dx`` over rows, and ``y = f(x + b)``.

    dx and y have the dtype of x, db that of the bias, or of x where the bias is not given since x
    contains it. Sums are fp32 or wider.
    """
    f, x = scalar_function(function, parameters), x.contiguous()
    if bias is not None:
        return _backward_with_bias(f, dy, x, bias, want_dx, want_db, want_y)
    rows = rows_per_block(x) if want_db else 0
    dx = db = y = None
    if rows:
        dx, db = in_blocks(f, dy, x, rows)
    elif want_dx or want_db:
        dx = f.backward(cast(dy, x.dtype), x).contiguous()
        if want_db:
            dims = tuple(range(x.dim() - 1))
            db = dx.sum(dims, dtype=wide_dtype(x.dtype)) if dims else dx.clone()
    if want_y:
        y = cast(f.value(x), x.dtype)
    results = (dx if want_dx else None, None if db is None else cast(db, x.dtype), y)
    return [t for t in results if t is not None]


def _backward_with_bias(
    f: ScalarFunction,
    dy: Tensor,
    x: Tensor,
    bias: Tensor,
    want_dx: bool,
    want_db: bool,
    want_y: bool,
) -> list[Tensor]:
    wide = wide_dtype(x.dtype)
    b = cast(bias, wide)
    dx, y = (empty_rows(x) if wanted else None for wanted in (want_dx, want_y))
    sums = []
    for x_rows, dy_rows, dx_rows, y_rows in row_blocks(x, dy, dx, y):
        z = cast(x_rows, wide) + b
        if want_dx or want_db:
            dz = f.backward(cast(dy_rows, wide), z)
            if want_db:
                sums.append(dz.sum(0))
            if dx_rows is not None:
                dx_rows.copy_(dz)
        if y_rows is not None:
            y_rows.copy_(f.value(z))
    db = cast(torch.stack(sums).sum(0), bias.dtype) if want_db else None
    return [t for t in (dx, db, y) if t is not None]


def rows_per_block(x: Tensor) -> int:
    """Rows to work on at a time on a CPU; 0 for all at once."""
    # While torch.compile traces, its size is not to be asked: the graph would hold for it alone.
    if torch.compiler.is_compiling() or x.numel() < _MIN_BLOCKS * BLOCK:
        return 0
    block = BLOCK * torch.get_num_threads()
    if x.device.type != "cpu" or x.dim() < 2 or x.numel() < _MIN_BLOCKS * block:
        return 0
    return max(1, block // x.shape[-1])


def in_blocks(f: ScalarFunction, dy: Tensor, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """dx, and its sum over rows in fp32 or wider, made while each block of dx is in the cache."""
    x_rows, dy_rows = x.flatten(0, -2), dy.flatten(0, -2)
    dx = x.new_empty(x_rows.shape)
    wide = wide_dtype(x.dtype)
    sums = []
    for start in range(0, len(dx), rows):
        block = slice(start, start + rows)
        f.backward(cast(dy_rows[block], x.dtype), x_rows[block], out=dx[block])
        sums.append(dx[block].sum(0, dtype=wide))
    return dx.view(dy.shape), torch.stack(sums).sum(0)


activation_forward = operator(
    "activation_forward(Tensor x, str function, float[] parameters, Tensor? bias) -> Tensor",
    launch=_forward_launch,
    plain=_forward_plain,
)
activation_backward = operator(
    "activation_backward(Tensor dy, Tensor x, str function, float[] parameters, Tensor? bias,"
    " bool want_dx, bool want_db, bool want_y) -> Tensor[]",
    launch=_backward_launch,
    plain=_backward_plain,
)

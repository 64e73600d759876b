"""Element-wise activations, with the bias before them: forward and backward.

Dimensions: R rows, C columns; ``x``, ``dy`` and results ``(…, C)``, bias and its gradient ``(C,)``.
A function is given as ``ScalarFunction.spec``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .activation_plain import ActivationGrads, backward_plain, dx_plain, forward_plain
from .choice import kernel_or_plain
from .column_sums import sum_columns
from .launch import DTYPES, Launch
from .scalar import FunctionSpec
from .tiling import TiledLaunch, TileRule, cdiv, empty_contiguous, rows_of

# Shares are those of a device-to-device copy on an H200.
_FLAT = TileRule(
    tile_bytes=2048,  # one access by each thread: 0.98
    warps=4,
)
_ROWS = TileRule(
    tile_bytes=4096,  # where a bias is to be added, two accesses: 0.92; one access, 0.79
    warps=4,
)
_BACKWARD_ROWS = TileRule(tile_bytes=4096, warps=4, ahead=1)
# 0.92 for bias, GELU, y and db of 16384 columns.
_SUMS = TileRule(
    tile_bytes=4096,
    warps=4,
    max_cols=128,
    programs=16,  # with 8: 0.89
    min_rows=96,  # per partial sum, so that these are 1.4% of the traffic
    ahead=3,  # with 1: 0.80
)


@functools.lru_cache(None)
def _flat_launch(
    kernel: str, name: str, parameters: tuple[float, ...], itemsize: int
) -> TiledLaunch:
    block = _FLAT.tile_bytes // itemsize
    constants = {"F": f"@scalar:{name}", "P": parameters, "BLOCK": block}
    return TiledLaunch(Launch(f"activation:{kernel}", constants, num_warps=_FLAT.warps), 1, block)


@functools.lru_cache(None)
def _rows_launch(
    kernel: str, name: str, parameters: tuple[float, ...], itemsize: int, cols: int, sums: bool
) -> TiledLaunch:
    rule = _ROWS if kernel == "forward_rows" else _SUMS if sums else _BACKWARD_ROWS
    constants = {"F": f"@scalar:{name}", "P": parameters}
    return rule.launch(f"activation:{kernel}", constants, cols, itemsize)


def _launch_forward(x: Tensor, spec: FunctionSpec, bias: Tensor | None) -> Tensor:
    y = empty_contiguous(x)
    _, name, parameters = spec
    if bias is None and x.is_contiguous():
        size = x.numel()
        flat = _flat_launch("forward_flat", name, parameters, x.element_size())
        flat.launch((cdiv(size, flat.block_cols), 1, 1), (x, y), (size,))
        return y
    rows, cols = y.shape[:-1].numel(), y.shape[-1]
    x, stride = rows_of(x)
    tiled = _rows_launch("forward_rows", name, parameters, x.element_size(), cols, False)
    tensors = (x, _readable(bias, x), y)
    tiled.launch((tiled.tiles(rows, cols), 1, 1), tensors, (rows, cols, stride))
    return y


def _readable(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    """``tensor`` in a dtype that kernels read."""
    return tensor if tensor is None or tensor.dtype in DTYPES else tensor.to(x.dtype)


def _launch_backward(
    dy: Tensor,
    x: Tensor,
    spec: FunctionSpec,
    bias: Tensor | None,
    want_dx: bool,
    want_db: bool,
    want_y: bool,
) -> ActivationGrads:
    _, name, parameters = spec
    dx = empty_contiguous(x) if want_dx else None
    y = empty_contiguous(x) if want_y else None
    flat = bias is None and dx is not None and not want_db
    if flat and x.is_contiguous() and dy.is_contiguous():
        size = x.numel()
        tiled = _flat_launch("backward_flat", name, parameters, x.element_size())
        tiled.launch((cdiv(size, tiled.block_cols), 1, 1), (dy, x, dx, y), (size,))
        return ActivationGrads(dx, None, y)
    rows, cols = x.shape[:-1].numel(), x.shape[-1]
    tiled = _rows_launch("backward_rows", name, parameters, x.element_size(), cols, want_db)
    if want_db:
        blocks, slices = tiled.slices(x, rows, cols)
    else:
        blocks, slices = cdiv(cols, tiled.block_cols), cdiv(rows, tiled.block_rows)
    db = parts = None
    if want_db:
        parts = db = x.new_empty(cols, dtype=x.dtype if bias is None else bias.dtype)
        if slices > 1:
            parts = x.new_empty((slices, cols), dtype=torch.float32)
    x, x_stride = rows_of(x)
    dy, dy_stride = rows_of(dy)
    tensors = (dy, x, _readable(bias, x), dx, y, parts)
    tiled.launch((blocks * slices, 1, 1), tensors, (rows, cols, dy_stride, x_stride, slices))
    if parts is not None and db is not None and parts is not db:
        sum_columns(parts, (db,), (slices,))
    return ActivationGrads(dx, db, y)


def _launch_dx(dy: Tensor, x: Tensor, spec: FunctionSpec) -> Tensor:
    dx = _launch_backward(dy, x, spec, None, True, False, False).dx
    assert dx is not None
    return dx


def _takes(dy: Tensor, x: Tensor, *_: Any) -> bool:
    return x.dtype in DTYPES


activation_forward = kernel_or_plain(launch=_launch_forward, plain=forward_plain)
activation_backward = kernel_or_plain(launch=_launch_backward, plain=backward_plain, accepts=_takes)
# What an activation by itself needs: on a CPU, the other results would take 0.5 us.
activation_dx = kernel_or_plain(launch=_launch_dx, plain=dx_plain, accepts=_takes)

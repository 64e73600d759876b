"""Gated products of scalar functions, over the two parts of the last dimension.

Dimensions: R rows, F columns of output; ``x (…, 2F)`` packs gates and linear units, ``y (…, F)``,
scales, one per row, ``(…)``. A product is given as ``product_spec`` makes it. Where that is of a
scalar function there are no linear units: x is ``(…, F)``, all gates.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .choice import kernel_or_plain
from .gated_plain import (
    GatedGrads,
    Product,
    ProductSpec,
    backward_plain,
    backward_traced,
    forward_plain,
)
from .launch import DTYPES
from .tiling import TiledLaunch, TileRule, cdiv, empty_contiguous, rows_of

# Blocks of fewer columns than 16 bytes hold.
_NARROW = (1, 2, 4)

_RULE = TileRule(
    # One access of 16 bytes by each thread, as in kernels.activation. Forward has two operands to
    # load and backward three, so that more bytes are in flight than in a copy.
    tile_bytes=2048,
    warps=4,
)


def product_constants(product: Product) -> dict[str, Any]:
    """A product of scalar functions as constants of a launch."""
    gate, gate_parameters, up, up_parameters, interleave = product
    return {
        "GATE": f"@scalar:{gate}",
        "GATE_P": gate_parameters,
        "UP": f"@scalar:{up}" if up else None,
        "UP_P": up_parameters,
        "INTERLEAVE": interleave,
    }


@functools.lru_cache(None)
def _tiled_launch(kernel: str, product: Product, itemsize: int, cols: int) -> TiledLaunch:
    constants = product_constants(product)
    constants["NARROW"] = constants["UP"] is not None and constants["INTERLEAVE"] in _NARROW
    return _RULE.launch(f"gated:{kernel}", constants, cols, itemsize)


def _launch_forward(x: Tensor, spec: ProductSpec, scales: Tensor | None) -> Tensor:
    *leading, cols = x.shape
    cols = cols // 2 if spec.up else cols
    y = x.new_empty(*leading, cols)
    rows = math.prod(leading)
    tiled = _tiled_launch("forward", spec[1:], x.element_size(), cols)
    x, stride = rows_of(x)
    tensors = (x, readable(scales), y)
    tiled.launch((tiled.tiles(rows, cols), 1, 1), tensors, (rows, cols, stride))
    return y


def readable(tensor: Tensor | None) -> Tensor | None:
    """``tensor``, contiguous, in a dtype that kernels read."""
    if tensor is None:
        return None
    return (tensor if tensor.dtype in DTYPES else tensor.to(torch.float32)).contiguous()


def _launch_backward(
    dy: Tensor,
    x: Tensor,
    spec: ProductSpec,
    scales: Tensor | None,
    want_dx: bool,
    want_y: bool,
    want_dscales: bool = True,
    over_x: bool = False,
) -> GatedGrads:
    dx = None
    if want_dx:
        dx = x if over_x and x.is_contiguous() else empty_contiguous(x)
    *leading, cols = dy.shape
    y = x.new_empty(*leading, cols) if want_y else None
    dscales = None
    if want_dscales and scales is not None:
        dscales = x.new_empty(scales.shape, dtype=torch.float32)
    rows = math.prod(leading)
    tiled = _tiled_launch("backward", spec[1:], x.element_size(), cols)
    # A program takes whole rows if there are row sums to make.
    grid = tiled.tiles(rows, cols) if dscales is None else cdiv(rows, tiled.block_rows)
    x, x_stride = rows_of(x)
    dy, dy_stride = rows_of(dy)
    dx_stride = 0 if dx is None else dx.shape[-1]
    tensors = (dy, x, readable(scales), dx, dscales, y)
    tiled.launch((grid, 1, 1), tensors, (rows, cols, dy_stride, x_stride, dx_stride))
    return GatedGrads(dx, dscales, y)


def _takes(dy: Tensor, x: Tensor, *_: Any) -> bool:
    return x.dtype in DTYPES


gated_forward = kernel_or_plain(launch=_launch_forward, plain=forward_plain)
gated_backward = kernel_or_plain(
    launch=_launch_backward, plain=backward_plain, traced=backward_traced, accepts=_takes
)


def gated_backward_(
    dy: Tensor,
    x: Tensor,
    spec: ProductSpec,
    scales: Tensor | None,
    want_y: bool,
    want_dscales: bool = True,
) -> GatedGrads:
    """As :func:`gated_backward` with dx, for a caller who owns x and is done with it.

    dx is written over a contiguous x, except where torch.compile traces.
    """
    return gated_backward(dy, x, spec, scales, True, want_y, want_dscales, True)

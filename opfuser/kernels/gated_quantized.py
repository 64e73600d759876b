"""Gated products of scalar functions to fp8, and gradients, from one read.

Dimensions: R rows, F columns of output; ``x (R, 2F)``, or (R, F) where there are no linear units,
``dy (R, F)``, ``bias (F,)``. Products are given as ``gated.product_spec`` makes them, scales as
``Scaling``; results are as in ``opfuser.kernels.quantize``. What is encoded is not rounded before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .choice import kernel_or_plain
from .gated import product_constants, readable
from .gated_plain import Product, ProductSpec
from .gated_quantized_plain import (
    SAVED,
    GatedGrads,
    GatedOutput,
    backward_quantized_plain,
    forward_quantized_plain,
)
from .launch import DTYPES, Launch, has_fp8
from .quantize import (
    ScaleKind,
    Tile,
    add_up,
    dequantize,
    empty_block_scales,
    empty_codes,
    empty_sums,
    quantize,
    scale_and_raised,
    scale_kind,
)
from .quantize_plain import BLOCK, BlockScaling, Codes, MeasuredScaling, Scaling, TensorScaling
from .tiling import rows_of

# Shares are those of a device-to-device copy of as many bytes on an H200, for SwiGLU.
_FORWARD = Tile(32, BLOCK, 4)  # 0.98 of 8192 x 14336, and 0.80 in blocks
# 0.93 of 8192 x 14336, 0.334 ms, and 0.332 with amax. 64 x 128: 0.408 and 0.331 ms; 64 x 64
# without groups 0.351, and by 4 warps 0.341.
_BACKWARD = Tile(64, 64, 8, group=4, access=8)
_FROM_CODES = Tile(64, BLOCK, 8, group=4, access=8)  # whose scales are those of blocks
_MAXIMA = Tile(32, BLOCK, 8)  # 0.180 ms, 0.87 of reading as much; by 4 warps 0.204
# Rows that backward in blocks takes at a time, for codes by rows and then by columns, and the steps
# that are loaded at once: 0.545 ms, 0.57. In steps of 32 by 8 warps, two of them at once by rows,
# 0.62 ms; of 64, 0.65; of 64 by 16 warps, 0.92.
_STEP, _COL_STEP = 16, 32
_STAGES, _COL_STAGES = 3, 2
_GROUP, _WARPS = 1, 4


@functools.lru_cache(None)
def _launch(
    kernel: str,
    tile: Tile,
    product: Product,
    kinds: tuple[ScaleKind, ...],
    square_cols: bool,
    itemsize: int,
    even: bool,
) -> Launch:
    constants = product_constants(product)
    for kind, prefix in zip(kinds, ("", "H_")):
        constants.update(kind.constants(prefix))
        if prefix or kernel.endswith("_by_blocks"):  # of both scales, or of none
            del constants[f"{prefix}MEASURED"]
    if kernel == "backward_by_blocks":
        ahead = (_STAGES, _COL_STAGES) if itemsize == 2 else (1, 1)  # else they spill
        constants.update(H_SQUARE_COLS=square_cols, STEP=_STEP, COL_STEP=_COL_STEP)
        constants.update(STAGES=ahead[0], COL_STAGES=ahead[1])
    return tile.launch(f"gated_quantized:{kernel}", constants, itemsize, even, product[-1])


def _launch_forward(
    x: Tensor, bias: Tensor | None, spec: ProductSpec, scaling: Scaling, want_x: bool
) -> GatedOutput:
    count, width = x.shape
    features = width // 2 if spec.up else width
    padded, rows, _ = empty_codes(x, features, scaling.dtype, _encodes(scaling), False)
    row_scale: Tensor | None
    how: tuple[Tensor | None, ...]
    if isinstance(scaling, BlockScaling):
        kernel = "forward_by_blocks"
        row_scale, _ = empty_block_scales(x, features, True, False)
        how = rows, row_scale
    else:
        kernel = "forward"
        row_scale = _inverse(scaling)
        x_rows = x_scale = None
        if want_x:
            _, x_rows, _ = empty_codes(x, width, SAVED.dtype, True, False)
            x_scale, _ = empty_block_scales(x, width, True, False)
        scale, amax = scale_and_raised(scaling)
        how = scale, rows, row_scale, amax, x_rows, x_scale
    even, kinds = _FORWARD.even(count, features), (scale_kind(scaling),)
    launch = _launch(kernel, _FORWARD, spec[1:], kinds, False, x.element_size(), even)
    x, stride = rows_of(x)
    grid = (_FORWARD.programs(padded, features), 1, 1)
    launch(grid, (x, readable(bias), *how), (count, padded, features, stride))
    h = Codes(rows, row_scale, None, None, None)
    return GatedOutput(h, Codes(x_rows, x_scale, None, None, None) if want_x else None)


def _launch_backward(
    dy: Tensor,
    x: Tensor | Codes,
    bias: Tensor | None,
    spec: ProductSpec,
    dx: Scaling,
    h: Scaling,
    column_sum: bool,
) -> GatedGrads:
    count, features = dy.shape
    x_scale: Tensor | None = None
    itemsize = dy.element_size()
    if isinstance(x, Codes):
        x_scale = x.row_scale
        assert x.rows is not None
        x = x.rows
    else:
        itemsize = x.element_size()
    width, encodes = x.shape[1], _encodes(dx)
    padded, rows, cols = empty_codes(x, width, dx.dtype, encodes, encodes)
    _, _, h_cols = empty_codes(x, features, h.dtype, False, encodes)
    row_scale: Tensor | None
    col_scale: Tensor | None
    h_scale: Tensor | None
    how: tuple[Tensor | None, ...]
    squares = isinstance(h, BlockScaling) and h.square_cols
    if isinstance(dx, BlockScaling) or isinstance(h, BlockScaling):
        # Each thread of a warp has four neighbors: a warp has rows for itself, and their maxima.
        tile = Tile(BLOCK, BLOCK, _WARPS, group=_GROUP, access=4 * x.element_size())
        kernel = "backward_by_blocks"
        row_scale, col_scale = empty_block_scales(x, width, True, True)
        _, h_scale = empty_block_scales(x, features, False, True, square_cols=squares)
        how = row_scale, col_scale, h_scale
    else:
        kernel, tile = "backward", _BACKWARD if x_scale is None else _FROM_CODES
        if not encodes:
            tile = _MAXIMA
        row_scale = col_scale = _inverse(dx)
        h_scale = _inverse(h)
        (s, amax), (h_s, h_amax) = scale_and_raised(dx), scale_and_raised(h)
        how = x_scale, s, h_s, row_scale, h_scale, amax, h_amax
    like = x if x_scale is None else dy.new_empty((0, width))
    sums, parts = empty_sums(like, padded, tile, column_sum)
    even = tile.even(count, features)
    kinds = scale_kind(dx), scale_kind(h)
    launch = _launch(kernel, tile, spec[1:], kinds, squares, itemsize, even)
    x, x_stride = rows_of(x)
    dy, dy_stride = rows_of(dy)
    tensors = dy, x, readable(bias), rows, cols, h_cols, *how, parts
    ints = count, padded, features, dy_stride, x_stride
    launch((tile.programs(padded, features), 1, 1), tensors, ints)
    add_up(sums, parts)
    dx_codes = Codes(rows, row_scale, cols, col_scale, sums)
    return GatedGrads(dx_codes, Codes(None, None, h_cols, h_scale, None))


def _encodes(scaling: Scaling) -> bool:
    return not isinstance(scaling, TensorScaling) or scaling.scale is not None


def _inverse(scaling: TensorScaling | MeasuredScaling) -> Tensor | None:
    """Memory for ``1 / s``."""
    scale, _ = scale_and_raised(scaling)
    return None if scale is None else torch.empty_like(scale)


def _takes_forward(
    x: Tensor, bias: Tensor | None, spec: ProductSpec, scaling: Scaling, *_: Any
) -> bool:
    features = x.shape[1] // 2 if spec.up else x.shape[1]
    blocks = isinstance(scaling, BlockScaling)
    # Plain torch raises where columns do not fill blocks.
    return x.numel() > 0 and has_fp8(x) and not (blocks and features % BLOCK)


def _takes_backward(
    dy: Tensor, x: Tensor | Codes, bias: Tensor | None, spec: ProductSpec, dx: Scaling, *_: Any
) -> bool:
    if isinstance(dx, BlockScaling) and (dy.shape[1] % BLOCK or spec.interleave % BLOCK):
        return False  # a block has gates and linear units
    return (isinstance(x, Codes) or x.dtype in DTYPES) and dy.numel() > 0 and has_fp8(dy)


_forward = kernel_or_plain(
    launch=_launch_forward, plain=forward_quantized_plain, accepts=_takes_forward
)
_backward = kernel_or_plain(
    launch=_launch_backward, plain=backward_quantized_plain, accepts=_takes_backward
)


def gated_forward_quantized(
    x: Tensor, bias: Tensor | None, spec: ProductSpec, scaling: Scaling
) -> Codes:
    """Codes of ``h = gate(a) up(b)``, (R, F), by rows; without linear units ``gate(x + bias)``.

    Args:
        x: in fp32, bf16 or fp16.
        bias: None where there are linear units.
        scaling: of h; F is a multiple of 128 for blocks.
    """
    assert bias is None or spec.up is None
    h: Codes = _forward(x, bias, spec, scaling, False).h
    return h


def fills_blocks(width: int, spec: ProductSpec) -> bool:
    """Whether blocks of 128 columns of x lie within gates or within linear units."""
    return width % (2 * BLOCK if spec.up else BLOCK) == 0 and spec.interleave % BLOCK == 0


def quantize_input(x: Tensor) -> Codes:
    """Codes of x by rows, (R, C) in E4M3, with a scale for each row of 128 columns."""
    return quantize(x, SAVED, rows=True, cols=False)


def gated_forward_and_input(
    x: Tensor, bias: Tensor | None, spec: ProductSpec, scaling: Scaling
) -> GatedOutput:
    """As :func:`gated_forward_quantized`, and codes of x, from one read; of blocks of h, from two.

    Codes of x are those of :func:`quantize_input`; :func:`fills_blocks` says where there are any.
    """
    assert bias is None or spec.up is None
    assert fills_blocks(x.shape[1], spec)
    if isinstance(scaling, BlockScaling):
        return GatedOutput(gated_forward_quantized(x, bias, spec, scaling), quantize_input(x))
    output: GatedOutput = _forward(x, bias, spec, scaling, True)
    return output


def gated_backward_quantized(
    dy: Tensor,
    x: Tensor | Codes,
    bias: Tensor | None,
    spec: ProductSpec,
    dx: Scaling,
    h: Scaling,
    *,
    column_sum: bool = False,
) -> GatedGrads:
    """Codes of the gradient of x by rows and by columns, and of h by columns.

    Args:
        dy: gradient of h.
        x, bias, spec: those of :func:`gated_forward_quantized`; or for x codes of
            :func:`quantize_input`, whose values count, where it :func:`fills_blocks`.
        dx, h: their scalings: of one kind, and both with a scale or both without. For blocks the
            columns of x are a multiple of 128, and only h may have the scales of squares.
        column_sum: whether the sum of dx over the rows is wanted, before it is rounded: in the
            dtype of x, of codes in that of dy; accumulated in fp32.
    """
    assert bias is None or spec.up is None
    assert type(dx) is type(h)
    assert not isinstance(dx, BlockScaling) or not dx.square_cols
    assert _encodes(dx) == _encodes(h)
    if isinstance(x, Codes):
        assert x.rows is not None
        assert fills_blocks(x.rows.shape[1], spec)
        if isinstance(dx, BlockScaling):  # whose kernel reads x twice, as it is
            x = dequantize(x, dy.shape[0], dy.dtype)
    grads: GatedGrads = _backward(dy, x, bias, spec, dx, h, column_sum)
    return grads

"""Gated products of scalar functions to fp8, and gradients: one read, one given scale per tensor.

Dimensions: R rows, F columns of output; ``x (R, 2F)``, or (R, F) where there are no linear units,
``dy (R, F)``. Products are given as ``gated.product_spec`` makes them; scales, dtypes, maxima and
results are as in ``opfuser.kernels.quantize``. What is encoded is not rounded before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .choice import kernel_or_plain
from .gated import product_constants
from .gated_plain import ProductSpec
from .gated_quantized_plain import (
    GatedGrads,
    backward_quantized_plain,
    forward_quantized_plain,
)
from .launch import DTYPES, Launch, has_fp8
from .quantize import Tile, empty_codes
from .quantize_plain import Codes
from .tiling import rows_of

__all__ = ["GatedGrads", "gated_backward_quantized", "gated_forward_quantized"]

# Shares are those of a device-to-device copy of as many bytes on an H200, for SwiGLU.
_FORWARD = Tile(32, 128, 4)  # 1.01 of 8192 x 14336 in blocks; with 8 warps 0.92
# 0.93 of 8192 x 14336 with amax, 0.330 ms, of a kernel that took all four rows at a time; without
# groups 0.342 ms. With an access of 16 bytes and 4 warps, 0.340.
_BACKWARD = Tile(64, 64, 8, group=4, access=8)


@functools.lru_cache(None)
def _launch(
    kernel: str,
    tile: Tile,
    gate: str,
    gate_parameters: tuple[float, ...],
    up: str | None,
    up_parameters: tuple[float, ...],
    interleave: int,
    dtypes: tuple[torch.dtype, ...],
    itemsize: int,
    even: bool,
) -> Launch:
    constants = product_constants(gate, gate_parameters, up, up_parameters, interleave)
    names = ("E5M2", "H_E5M2")
    constants.update((n, d == torch.float8_e5m2) for n, d in zip(names, dtypes))
    return tile.launch(f"gated_quantized:{kernel}", constants, itemsize, even, interleave)


def _launch_forward(
    x: Tensor, spec: ProductSpec, scale: Tensor, dtype: torch.dtype, amax: Tensor | None
) -> Codes:
    count, features = x.shape
    features = features // 2 if spec.up else features
    padded, rows, _ = empty_codes(x, features, dtype, True, False)
    inverse = torch.empty_like(scale)
    even = _FORWARD.even(count, features)
    launch = _launch("forward", _FORWARD, *spec[1:], (dtype,), x.element_size(), even)
    x, stride = rows_of(x)
    grid = (_FORWARD.programs(padded, features), 1, 1)
    launch(grid, (x, scale, rows, inverse, amax), (count, padded, features, stride))
    return Codes(rows, inverse, None, None, None)


def _launch_backward(
    dy: Tensor,
    x: Tensor,
    spec: ProductSpec,
    dx_scale: Tensor,
    dx_dtype: torch.dtype,
    h_scale: Tensor,
    h_dtype: torch.dtype,
    dx_amax: Tensor | None,
    h_amax: Tensor | None,
) -> GatedGrads:
    count, features = dy.shape
    padded, rows, cols = empty_codes(x, x.shape[1], dx_dtype, True, True)
    _, _, h = empty_codes(x, features, h_dtype, False, True)
    dx_inverse, h_inverse = torch.empty_like(dx_scale), torch.empty_like(h_scale)
    even = _BACKWARD.even(count, features)
    dtypes = dx_dtype, h_dtype
    launch = _launch("backward", _BACKWARD, *spec[1:], dtypes, x.element_size(), even)
    x, x_stride = rows_of(x)
    dy, dy_stride = rows_of(dy)
    scales = dx_scale, h_scale, dx_inverse, h_inverse, dx_amax, h_amax
    ints = count, padded, features, dy_stride, x_stride
    grid = (_BACKWARD.programs(padded, features), 1, 1)
    launch(grid, (dy, x, rows, cols, h, *scales), ints)
    dx_codes = Codes(rows, dx_inverse, cols, dx_inverse, None)
    return GatedGrads(dx_codes, Codes(None, None, h, h_inverse, None))


def _takes_forward(x: Tensor, *_: Any) -> bool:
    return x.numel() > 0 and has_fp8(x)


def _takes_backward(dy: Tensor, x: Tensor, *_: Any) -> bool:
    return x.dtype in DTYPES and dy.numel() > 0 and has_fp8(x)


_forward = kernel_or_plain(
    launch=_launch_forward, plain=forward_quantized_plain, accepts=_takes_forward
)
_backward = kernel_or_plain(
    launch=_launch_backward, plain=backward_quantized_plain, accepts=_takes_backward
)


def gated_forward_quantized(
    x: Tensor,
    spec: ProductSpec,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    amax: Tensor | None = None,
) -> Codes:
    """Codes of ``h = gate(a) up(b)``, (R, F), by rows; ``amax`` is raised to ``max |h|``."""
    codes: Codes = _forward(x, spec, scale, dtype, amax)
    return codes


def gated_backward_quantized(
    dy: Tensor,
    x: Tensor,
    spec: ProductSpec,
    dx_scale: Tensor,
    dx_dtype: torch.dtype,
    h_scale: Tensor,
    h_dtype: torch.dtype,
    *,
    dx_amax: Tensor | None = None,
    h_amax: Tensor | None = None,
) -> GatedGrads:
    """Codes of the gradient of x by rows and by columns, and of h by columns.

    ``dx_amax`` is raised to ``max |dx|``, ``h_amax`` to ``max |h|``.
    """
    grads: GatedGrads = _backward(
        dy, x, spec, dx_scale, dx_dtype, h_scale, h_dtype, dx_amax, h_amax
    )
    return grads

"""Launches of norms to fp8 in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.norm_quantized import norm_cols_quantized, norm_forward_quantized
from opfuser.kernels.quantize import BlockScaling, MeasuredScaling, Scaling, TensorScaling
from tests.kernels.shipping import Family, empty

BF16, FP32 = torch.bfloat16, torch.float32
E4M3 = torch.float8_e4m3fn
EPS = 1e-5


def one() -> Tensor:
    return empty(1, dtype=FP32)


SCALINGS: dict[str, Scaling] = {
    "measured": MeasuredScaling(one(), E4M3),
    "with amax": TensorScaling(one(), E4M3, one()),
    "given": TensorScaling(one(), E4M3),
    "amax alone": TensorScaling(None, E4M3, one()),
    "in blocks": BlockScaling(E4M3),
    "in squares": BlockScaling(E4M3, square_cols=True),
}


def of_rows(x: Tensor) -> Tensor:
    return empty(len(x), dtype=FP32)


def forward(x: Tensor, *, layer: bool, add: bool, centered: bool, scaling: Scaling) -> object:
    weight, residual = torch.empty_like(x[0]), torch.empty_like(x) if add else None
    bias = weight if layer else None
    return norm_forward_quantized(x, residual, weight, bias, EPS, centered, layer, scaling)


def columns(x: Tensor, *, layer: bool, centered: bool, scaling: Scaling) -> object:
    weight, mean = torch.empty_like(x[0]), of_rows(x) if layer else None
    bias = weight if layer else None
    return norm_cols_quantized(x, weight, bias, mean, of_rows(x), centered, scaling)


def l2_forward(x: Tensor) -> object:
    return norm_forward_quantized(x, None, None, None, EPS, False, False, SCALINGS["with amax"])


SHIPPED = Family()
SHAPES = (
    (8192, 4096, BF16),
    (8100, 4096, BF16),
    (2048, 1024, BF16),
    (4096, 2880, BF16),
    (8192, 5120, BF16),
    (8192, 8192, BF16),
    (4096, 16384, BF16),
    (4096, 4096, FP32),
    (4096, 8192, FP32),
    (4096, 16384, FP32),
)
for n, (rows, cols, dtype) in enumerate(SHAPES):
    x = empty(rows, cols, dtype=dtype)
    codes = -(-rows // 128) * 128 / rows / dtype.itemsize  # as a share of x
    for m, (name, scaling) in enumerate(SCALINGS.items()):
        blocks = isinstance(scaling, BlockScaling)
        if blocks and cols % 128:
            continue
        written = codes * (1 + 4 / 128) if blocks else 0 if name == "amax alone" else codes
        layer = (n + m) % 2 == 0  # each scaling has both
        kind = f"{'layer' if layer else 'rms'} {rows} x {cols} {dtype} {name}"
        how = {"layer": layer, "centered": not layer and name == "in blocks"}
        given = {**how, "scaling": scaling}
        SHIPPED.ship(f"{kind} columns", 1 + written, columns, x, **given)
        if name in ("in squares", "given"):
            continue  # by rows they are blocks; forward looks at the values
        SHIPPED.ship(kind, 1 + written, forward, x, add=False, **given)
        SHIPPED.ship(f"add + {kind}", 3 + written, forward, x, add=True, **given)
SHIPPED.ship("l2", 1.5, l2_forward, empty(2**20, 128))

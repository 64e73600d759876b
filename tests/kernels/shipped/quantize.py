"""Launches of quantization in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.quantize import (
    BlockScaling,
    MeasuredScaling,
    TensorScaling,
    amax_of,
    quantize,
    quantize_by_squares,
    transpose_codes,
)
from tests.kernels.shipping import Family, empty

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def by_tensor(x: Tensor, *, dtype: torch.dtype, amax: bool, **how: bool) -> object:
    one = empty(1, dtype=FP32)
    scaling = TensorScaling(one, dtype, torch.empty_like(one) if amax else None)
    return quantize(x, scaling, **how)


def measured(x: Tensor, *, dtype: torch.dtype, **how: bool) -> object:
    return quantize(x, MeasuredScaling(empty(1, dtype=FP32), dtype), **how)


SHIPPED = Family()
for rows, cols, source in (
    (8192, 4096, BF16),
    (8192, 14336, BF16),
    (2048, 1024, BF16),
    (8100, 4096, BF16),
    (28672, 4096, FP32),
):
    x = empty(rows, cols, dtype=source)
    size = f"{rows} x {cols} {source}"
    padded = -(-rows // 128) * 128
    layout = padded / rows / source.itemsize  # bytes of codes by rows, as a share of those of x
    scales = layout * 4 / 128
    both, by_rows = {"rows": True, "cols": True}, {"rows": True, "cols": False}
    for dtype in (E4M3, E5M2):
        SHIPPED.ship(
            f"{size} {dtype}", 1 + 2 * layout, by_tensor, x, dtype=dtype, amax=True, **both
        )
    SHIPPED.ship(
        f"{size} with sums", 1 + 2 * layout, by_tensor, x,
        dtype=E5M2, amax=True, column_sum=True, **both,
    )  # fmt: skip
    SHIPPED.ship(f"{size} rows", 1 + layout, by_tensor, x, dtype=E4M3, amax=True, **by_rows)
    SHIPPED.ship(  # in backward: what forward has seen
        f"{size} cols", 1 + layout, by_tensor, x, dtype=E4M3, amax=False, rows=False, cols=True
    )
    for name, how, layouts in (
        ("both, with sums", {**both, "column_sum": True}, 2),
        ("rows", by_rows, 1),
        ("cols", {"rows": False, "cols": True}, 1),
    ):
        SHIPPED.ship(
            f"{size} {name}, measured", 1 + layouts * layout, measured, x,
            dtype=E5M2 if layouts == 2 else E4M3, **how,
        )  # fmt: skip
    if cols == 4096:
        blocks, squares = BlockScaling(E4M3), BlockScaling(E4M3, square_cols=True)
        for name, scaling, how, layouts in (
            ("both", BlockScaling(E4M3, power_of_two=False), both, 2),
            ("both with sums", blocks, {**both, "column_sum": True}, 2),
            ("rows", blocks, by_rows, 1),
            ("cols", blocks, {"rows": False, "cols": True}, 1),
            ("both, columns in squares", squares, both, 2),
        ):
            passes = 1 + layouts * (layout + scales)
            SHIPPED.ship(f"{size} blocks {name}", passes, quantize, x, scaling=scaling, **how)
        SHIPPED.ship(f"{size} squares", 1 + 2 * layout, quantize_by_squares, x, dtype=E4M3, **both)

for dtype in (BF16, FP32):
    SHIPPED.ship(f"amax of {dtype}", 1, amax_of, empty(28672, 4096, dtype=dtype))
for rows, cols in ((28672, 4096), (1040, 2064)):  # W by columns; the second has no whole tiles
    SHIPPED.ship(f"transpose {rows} x {cols}", 2, transpose_codes, empty(rows, cols, dtype=E4M3))

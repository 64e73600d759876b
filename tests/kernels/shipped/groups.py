"""Launches for groups of rows in the sizes of real experts, and the bytes that they may move."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from opfuser.kernels.grouped_products import columns_by_columns, rows_by_matrices
from opfuser.kernels.groups import (
    Grouped,
    VectorScaling,
    maxima_of_groups,
    quantize_groups,
)
from opfuser.kernels.quantize import BlockScaling, MeasuredScaling, TensorScaling
from tests.kernels.shipping import Family, Shipped, empty

FP32, BF16, INT32 = torch.float32, torch.bfloat16, torch.int32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHIPPED = Family()


one = empty(1, dtype=FP32)
WANTED = {
    "both": {"rows": True, "cols": True},
    "rows": {"rows": True, "cols": False},
    "cols": {"rows": False, "cols": True},
}
# Rows, groups, features: a balanced mixture of 128 experts, its weights, and one of 8 experts.
for rows, groups, features, uniform, source in (
    (131072, 128, 2048, False, torch.bfloat16),
    (32768, 8, 14336, False, torch.bfloat16),
    (128 * 1536, 128, 2048, True, torch.bfloat16),
    (8192, 32, 784, False, torch.bfloat16),
    (8192, 32, 2048, False, FP32),
):
    x = empty(rows, features, dtype=source)
    grouped = Grouped(groups, None if uniform else empty(2, groups, dtype=INT32))
    size = f"{rows} in {groups} x {features} {source}"
    byte = 1 / source.itemsize
    padded = byte * (1 if uniform else 1 + groups * 128 / rows)
    passes = {"both": byte + padded, "rows": byte, "cols": padded}
    vectors = {"both": 12 / features + 12 * groups / rows}
    for name, wanted in WANTED.items():
        amax = TensorScaling(one, E5M2, torch.empty_like(one))
        for kind, scaling in (
            ("vectors", VectorScaling(E4M3)),
            ("measured", MeasuredScaling(one, E4M3)),
            ("given", amax),
        ):
            # Vectors are read twice, and of each row and column a maximum.
            twice = 2.02 if kind == "vectors" else 1.02
            SHIPPED.ship(
                f"{size} {kind} {name}", twice + passes[name], quantize_groups, x,
                groups=grouped, scaling=scaling, **wanted,
            )  # fmt: skip
        if features % 128 == 0 and not uniform:
            for scaling in (
                BlockScaling(E4M3),
                BlockScaling(E4M3, True, True),
                BlockScaling(E4M3, False),
            ):
                scales = passes[name] / byte * 4 / 128 * byte
                SHIPPED.ship(
                    f"{size} {scaling} {name}", 1 + passes[name] + scales, quantize_groups, x,
                    groups=grouped, scaling=scaling, **wanted,
                )  # fmt: skip
    SHIPPED.ship(f"{size} maxima", 1.02, maxima_of_groups, x, groups=grouped, rows=True, cols=True)


# Gathered from tokens of 8 experts each, which a GPU's cache holds until all have read them.
x, sources = empty(131072 // 8, 2048), empty(131072, dtype=torch.int64)
grouped = Grouped(128, empty(2, 128, dtype=INT32), sources)
for scaling in (VectorScaling(E4M3), TensorScaling(one, E4M3), BlockScaling(E4M3, True, True)):
    twice = 2 if isinstance(scaling, VectorScaling) else 1
    SHIPPED.ship(
        f"gathered, {scaling}", twice + 4 + 4 * 1.125 + 0.3, quantize_groups, x,
        groups=grouped, scaling=scaling, rows=True, cols=True,
    )  # fmt: skip


def traffic(*tensors: Tensor) -> int:
    return sum(t.nbytes for t in tensors)


def ship_products(rows: int, groups: int, k: int, n: int) -> None:
    padded, ends = rows + groups * 128, empty(2, groups, dtype=INT32)
    for kind, dtype, split, left in (
        ("vectors", torch.bfloat16, False, E4M3),
        ("vectors", FP32, True, E5M2),
        ("blocks", torch.bfloat16, True, E4M3),
        ("squares", torch.bfloat16, True, E4M3),
        ("values", torch.bfloat16, True, BF16),
        ("values", FP32, True, BF16),
    ):
        blocks, right_type = kind in ("blocks", "squares"), BF16 if left == BF16 else E4M3
        if blocks and (k % 128 or n % 128):
            continue
        a, b = empty(rows, k, dtype=left), empty(groups, n, k, dtype=right_type)
        a_scale = empty(k // 128, rows, dtype=FP32) if blocks else empty(rows, dtype=FP32)
        b_scale = (
            empty(groups, n // 128, k // 128, dtype=FP32)
            if blocks
            else empty(groups, n, dtype=FP32)
        )
        y = empty(rows, n, dtype=dtype)
        name = f"{rows} in {groups}, {k} to {n} {kind} {dtype}"

        given: Any = {"ends": ends, "dtype": dtype, "split": split}
        scales: Any = {"a_scale": a_scale, "b_scale": b_scale}
        forward = partial(rows_by_matrices, a, b=b, **scales, **given)
        SHIPPED[name] = Shipped(forward, traffic(a, b, a_scale, b_scale, y))
        left_codes, right = empty(n, padded, dtype=left), empty(k, padded, dtype=right_type)
        if blocks:
            a_scale = empty(padded // 128, n, dtype=FP32)
            b_scale = empty(padded // 128, k, dtype=FP32)
            if kind == "squares":
                b_scale = empty(k // 128, -(-padded // 512) * 4, dtype=FP32)
        else:
            a_scale, b_scale = empty(groups * n, dtype=FP32), empty(groups * k, dtype=FP32)
        dw = empty(groups, n, k, dtype=dtype)

        scales = {"a_scale": a_scale, "b_scale": b_scale}
        wgrad = partial(columns_by_columns, left_codes, b=right, **scales, **given)
        tensors = left_codes, right, a_scale, b_scale, dw
        SHIPPED[f"{name} wgrad"] = Shipped(wgrad, traffic(*tensors))


ship_products(131072, 128, 2048, 1536)
ship_products(32768, 8, 4096, 28672)
ship_products(4096, 16, 784, 528)

"""Launches to MXFP8 and NVFP4 in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from opfuser.kernels import microscaling
from opfuser.kernels.groups import Grouped
from opfuser.kernels.microscaling import decode, quantize_mxfp8, quantize_nvfp4
from tests.kernels.shipping import Family, empty

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def nvfp4(
    x: Tensor, *, converts: bool, stochastic: bool = False, scales: int = 1, **how: Any
) -> object:
    """As on GPUs that convert to 4 bits, or as on others."""
    seed = empty(1, dtype=torch.int64) if stochastic else None
    with mock.patch.object(microscaling, "has_fp4", return_value=converts):
        return quantize_nvfp4(x, empty(scales, dtype=FP32), seed=seed, **how)


SHIPPED = Family()
for rows, cols, source in (
    (8192, 4096, BF16),
    (8192, 14336, BF16),
    (2048, 1024, BF16),
    (8100, 2880, BF16),
    (28672, 4096, FP32),
):
    x = empty(rows, cols, dtype=source)
    size = f"{rows} x {cols} {source}"
    padded = -(-rows // 128) * 128
    byte = padded / rows / source.itemsize  # one for each element, as a share of x
    both = {"rows": True, "cols": True}
    mx, nv = byte * (1 + 1 / 32), byte * (1 / 2 + 1 / 16)
    for name, layouts, how in (
        ("both", 2, {**both, "dtype": E4M3}),
        ("both with sums", 2, {**both, "dtype": E5M2, "column_sum": True}),
        ("rows", 1, {"rows": True, "cols": False, "dtype": E4M3}),
        ("cols", 1, {"rows": False, "cols": True, "dtype": E4M3}),
    ):
        SHIPPED.ship(f"mxfp8 {size} {name}", 1 + layouts * mx, quantize_mxfp8, x, **how)
    sums = byte * 2 * 4 / 64  # those of tiles of 64 rows, written and read: more than all scales
    gradient = {"transform": True, "stochastic": True}
    for converts in (True, False):
        where = "sm_100" if converts else "elsewhere"
        for name, passes, how in (
            ("input", 1 + 2 * nv, {**both, "transform": True}),
            ("weight", 1 + 2 * nv, {**both, "squares": True}),
            ("gradient", 1 + 2 * nv + sums, {**both, **gradient, "column_sum": True}),
            ("gradient without sums", 1 + 2 * nv, {**both, **gradient}),
            ("gradient rows", 1 + nv, {"rows": True, "cols": False, "stochastic": True}),
            ("weight rows", 1 + nv, {"rows": True, "cols": False, "squares": True}),
            ("weight cols", 1 + nv, {"rows": False, "cols": True, "squares": True}),
            ("nearest", 1 + 2 * nv, both),
        ):
            SHIPPED.ship(f"nvfp4 {size} {name} {where}", passes, nvfp4, x, converts=converts, **how)

# Of a balanced mixture of 128 experts, and weights of these.
for rows, cols, uniform, source in ((131072, 2048, False, BF16), (128 * 1536, 2080, True, FP32)):
    x = empty(rows, cols, dtype=source)
    ends = None if uniform else empty(2, 128, dtype=torch.int32)
    size = f"{rows} in 128 x {cols} {source}"
    groups: dict[str, Any] = {"groups": Grouped(128, ends), "rows": True, "cols": True}
    padded = 1 if uniform else 1 + 128 * 128 / rows
    # Scales by columns are those of columns up to a multiple of 128.
    mx, nv = ((1 + padded) * n / source.itemsize + 0.01 for n in (1 + 1 / 32, 1 / 2 + 1 / 16))
    SHIPPED.ship(f"mxfp8 {size}", 1 + mx, quantize_mxfp8, x, dtype=E4M3, **groups)
    for converts in (True, False):
        where = "sm_100" if converts else "elsewhere"
        how = {"squares": True, "scales": 128} if uniform else gradient
        SHIPPED.ship(f"nvfp4 {size} {where}", 1 + nv, nvfp4, x, converts=converts, **how, **groups)
    for dtype, block, name in (
        (E4M3, 32, "e4m3"),
        (E5M2, 32, "e5m2"),
        (microscaling.FP4, 16, "e2m1"),
    ):
        packed = 2 if block == 16 else 1
        codes = empty(rows, cols // packed, dtype=dtype)
        scale = empty(rows * -(-cols // 128) * 128 // block + 4 * (packed - 1), dtype=E4M3)
        scale = scale if block == 16 else scale.view(microscaling.E8M0)
        passes = 1 + 2 * packed + 1.03 * packed / block
        SHIPPED.ship(f"decode {size} {name}", passes, lambda x, s=scale: decode(x, s), codes)

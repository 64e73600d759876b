"""Launches of gated activations to fp8 in the sizes of real models, and the bytes they may move."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.capped_functions import ClampedSwish, ShiftedClamp, SoftCap, SoftCappedSwish
from opfuser.kernels.functions import GeluErf, GeluTanh, Relu, SquaredRelu, Swish
from opfuser.kernels.gated_plain import Glu, product_spec
from opfuser.kernels.gated_quantized import (
    gated_backward_quantized,
    gated_forward_and_input,
    gated_forward_quantized,
)
from opfuser.kernels.quantize import (
    BlockScaling,
    Codes,
    MeasuredScaling,
    Scaling,
    TensorScaling,
)
from opfuser.kernels.scalar import ScalarFunction
from tests.kernels.shipping import Family, empty

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def one() -> Tensor:
    return empty(1, dtype=FP32)


def scaling(dtype: torch.dtype, amax: bool, encodes: bool = True) -> TensorScaling:
    return TensorScaling(one() if encodes else None, dtype, one() if amax else None)


def forward(
    x: Tensor, *, f: Glu | ScalarFunction, how: Scaling, bias: bool = False, saves: bool = False
) -> object:
    call = gated_forward_and_input if saves else gated_forward_quantized
    return call(x, empty(x.shape[1]) if bias else None, product_spec(f), how)


def backward(
    x: Tensor,
    *,
    f: Glu | ScalarFunction,
    dx: Scaling,
    h: Scaling,
    bias: bool = False,
    column_sum: bool = False,
    saved: bool = False,
) -> object:
    dy = empty(x.shape[0], x.shape[1] // (2 if isinstance(f, Glu) else 1), dtype=x.dtype)
    given = empty(x.shape[1]) if bias else None
    kept: Tensor | Codes = x
    if saved:
        padded = -(-x.shape[0] // 128) * 128
        scale = empty(x.shape[1] // 128, padded, dtype=FP32)
        kept = Codes(empty(padded, x.shape[1], dtype=E4M3), scale, None, None, None)
    return gated_backward_quantized(dy, kept, given, product_spec(f), dx, h, column_sum=column_sum)


SHIPPED = Family()
FUNCTIONS: tuple[tuple[str, Glu | ScalarFunction, int, int, torch.dtype], ...] = (
    ("swiglu", Glu(Swish()), 8192, 14336, BF16),
    ("swiglu", Glu(Swish()), 2048, 3584, BF16),
    ("swiglu", Glu(Swish()), 8100, 14336, BF16),
    ("swiglu", Glu(Swish()), 4096, 2880, FP32),
    ("swiglu", Glu(Swish()), 4096, 4096, FP32),
    ("swiglu in blocks of 32", Glu(Swish(), None, 32), 4096, 2880, BF16),
    ("swiglu in blocks of 128", Glu(Swish(), None, 128), 4096, 4096, BF16),
    ("reglu", Glu(Relu()), 4096, 16384, BF16),
    ("geglu", Glu(GeluTanh()), 4096, 16384, BF16),
    ("clamped", Glu(ClampedSwish(1.702, 7.0), ShiftedClamp(7.0, 1.0)), 4096, 2880, BF16),
    ("situ", Glu(SoftCappedSwish(4.0), SoftCap(25.0)), 4096, 2048, BF16),
    ("gelu", GeluErf(), 4096, 16384, BF16),
    ("gelu", GeluTanh(), 4000, 16384, BF16),
    ("squared relu", SquaredRelu(), 4096, 12288, BF16),
)
# Scales are given to every other one, with largest values to raise, and else come from these.
WAYS = (
    ("", scaling(E5M2, True), scaling(E4M3, True), scaling(E4M3, False)),
    (", measured", *(MeasuredScaling(one(), dtype) for dtype in (E5M2, E4M3, E4M3))),
)
for n, (name, f, rows, cols, source) in enumerate(FUNCTIONS):
    parts = 2 if isinstance(f, Glu) else 1
    x = empty(rows, parts * cols, dtype=source)
    size, (way, dx, h, h_again) = f"{name} {rows} x {cols} {source}", WAYS[n % 2]
    codes = -(-rows // 128) * 128 / rows / (parts * source.itemsize)  # of h, as a share of x
    read = 1 + 1 / parts  # dy with x
    SHIPPED.ship(f"{size} forward{way}", 1 + codes, forward, x, f=f, how=h)
    SHIPPED.ship(f"{size} amax of h", 1, forward, x, f=f, how=scaling(E4M3, True, False))
    passes = read + (2 * parts + 1) * codes
    SHIPPED.ship(f"{size} backward{way}", passes, backward, x, f=f, dx=dx, h=h_again)
    SHIPPED.ship(
        f"{size} backward with amax of h", passes, backward, x,
        f=f, dx=scaling(E5M2, True), h=scaling(E4M3, True),
    )  # fmt: skip
    SHIPPED.ship(
        f"{size} amax of dx and h", read, backward, x,
        f=f, dx=scaling(E5M2, True, False), h=scaling(E4M3, True, False),
    )  # fmt: skip
    sums = 2 * codes * parts * 4 / 64  # written and read
    SHIPPED.ship(
        f"{size} backward with sums{way}", passes + sums, backward, x,
        f=f, dx=dx, h=h, bias=parts == 1, column_sum=True,
    )  # fmt: skip
    if parts == 1:
        SHIPPED.ship(f"{size} forward with bias", 1 + codes, forward, x, f=f, how=h, bias=True)
    if cols % 128 == 0 and getattr(f, "interleave", None) in (None, 128):
        of_x = codes * parts * (1 + 4 / 128)
        SHIPPED.ship(
            f"{size} forward that saves x{way}", 1 + codes + of_x, forward, x,
            f=f, how=h, bias=parts == 1, saves=True,
        )  # fmt: skip
        passes = of_x + 1 / parts + (2 * parts + 1) * codes
        SHIPPED.ship(
            f"{size} backward from codes with sums{way}", passes + sums, backward, x,
            f=f, dx=dx, h=h, bias=parts == 1, column_sum=True, saved=True,
        )  # fmt: skip
        for h_amax in (False, True):
            what = f"{size} backward from codes without sums{' with amax of h' if h_amax else ''}"
            SHIPPED.ship(
                what, passes, backward, x,
                f=f, dx=scaling(E5M2, True), h=scaling(E4M3, h_amax), saved=True,
            )  # fmt: skip
        SHIPPED.ship(
            f"{size} amax of dx and h from codes", of_x + 1 / parts, backward, x,
            f=f, dx=scaling(E5M2, True, False), h=scaling(E4M3, True, False), saved=True,
        )  # fmt: skip
    if cols % 128 == 0:
        blocks = BlockScaling(E4M3)
        scales = 4 / 128
        passes = 1 + codes * (1 + scales)
        SHIPPED.ship(
            f"{size} forward in blocks", passes, forward, x, f=f, how=blocks, bias=parts == 1
        )
        passes = read + (2 * parts + 1) * codes * (1 + scales)
        for column_sum in (False, True):
            what = f"{size} backward in blocks{' with sums' if column_sum else ''}"
            SHIPPED.ship(
                what, passes + sums / 2 * column_sum, backward, x,
                f=f, dx=blocks, h=blocks, bias=parts == 1, column_sum=column_sum,
            )  # fmt: skip
        SHIPPED.ship(
            f"{size} backward in blocks, h in squares", passes, backward, x,
            f=f, dx=blocks, h=BlockScaling(E4M3, square_cols=True), bias=parts == 1,
        )  # fmt: skip

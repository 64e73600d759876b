"""Launches of gated activations to fp8 in the sizes of real models, and the bytes they may move."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.capped_functions import ClampedSwish, ShiftedClamp, SoftCap, SoftCappedSwish
from opfuser.kernels.functions import GeluTanh, Relu, Swish
from opfuser.kernels.gated import Glu, product_spec
from opfuser.kernels.gated_quantized import gated_backward_quantized, gated_forward_quantized
from tests.kernels.shipping import Family, empty

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def one() -> Tensor:
    return empty(1, dtype=FP32)


def forward(x: Tensor, *, product: Glu) -> object:
    return gated_forward_quantized(x, product_spec(product), one(), E4M3, amax=one())


def backward(x: Tensor, *, product: Glu, h_amax: bool) -> object:
    dy = empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    return gated_backward_quantized(
        dy, x, product_spec(product), one(), E5M2, one(), E4M3,
        dx_amax=one(), h_amax=one() if h_amax else None,
    )  # fmt: skip


SHIPPED = Family()
for name, product, rows, cols, source in (
    ("swiglu", Glu(Swish()), 8192, 14336, BF16),
    ("swiglu", Glu(Swish()), 2048, 3584, BF16),
    ("swiglu", Glu(Swish()), 8100, 14336, BF16),
    ("swiglu", Glu(Swish()), 4096, 2880, FP32),
    ("swiglu in blocks of 32", Glu(Swish(), None, 32), 4096, 2880, BF16),
    ("reglu", Glu(Relu()), 4096, 16384, BF16),
    ("geglu", Glu(GeluTanh()), 4096, 16384, BF16),
    ("clamped", Glu(ClampedSwish(1.702, 7.0), ShiftedClamp(7.0, 1.0)), 4096, 2880, BF16),
    ("situ", Glu(SoftCappedSwish(4.0), SoftCap(25.0)), 4096, 2048, BF16),
):
    x = empty(rows, 2 * cols, dtype=source)
    size = f"{name} {rows} x {cols} {source}"
    codes = -(-rows // 128) * 128 / rows / (2 * source.itemsize)  # of h, as a share of x
    SHIPPED.ship(f"{size} forward", 1 + codes, forward, x, product=product)
    for h_amax in (False, True):
        passes = 1.5 + 5 * codes
        what = f"{size} backward{' with amax of h' if h_amax else ''}"
        SHIPPED.ship(what, passes, backward, x, product=product, h_amax=h_amax)

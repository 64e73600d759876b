"""Launches of gated activations in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.capped_functions import (
    ClampedSwish,
    ShiftedClamp,
    SoftCap,
    SoftCappedSquaredRelu,
    SoftCappedSwish,
)
from opfuser.kernels.functions import GeluTanh, SquaredRelu, Swish
from opfuser.kernels.gated import gated_backward, gated_backward_, gated_forward
from opfuser.kernels.gated_plain import Glu, product_spec
from opfuser.kernels.scalar import ScalarFunction
from tests.kernels.shipping import Family, empty

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = 4096
Product = Glu | ScalarFunction
SWIGLU = Glu(Swish())
CLAMPED = ClampedSwish(1.702, 7.0), ShiftedClamp(7.0, 1.0)


def arguments(y: Tensor, product: Product, scaled: bool) -> tuple[Tensor, Tensor | None]:
    """x and scales for an output like y."""
    cols = y.shape[1] * (2 if isinstance(product, Glu) else 1)
    return empty(len(y), cols, dtype=y.dtype), torch.empty_like(y[:, 0]) if scaled else None


def forward(y: Tensor, *, product: Product, scaled: bool) -> object:
    x, scales = arguments(y, product, scaled)
    return gated_forward(x, product_spec(product), scales)


def backward(dy: Tensor, *, product: Product, scaled: bool, want_y: bool = False) -> object:
    x, scales = arguments(dy, product, scaled)
    return gated_backward(dy, x, product_spec(product), scales, True, want_y)


def in_place(dy: Tensor, *, product: Product) -> object:
    x, _ = arguments(dy, product, False)
    return gated_backward_(dy, x, product_spec(product), None, False)


SHIPPED = Family()
for name, product, cols, dtype, scaled, with_y in (
    ("swiglu", SWIGLU, 3584, BF16, False, True),
    ("swiglu", SWIGLU, 14336, BF16, False, True),
    ("swiglu", SWIGLU, 11008, BF16, False, True),
    ("swiglu", SWIGLU, 3584, FP32, False, True),
    ("scaled swiglu", SWIGLU, 2048, BF16, True, False),
    ("scaled swiglu", SWIGLU, 2048, FP32, True, False),
    ("clamped in blocks of 1", Glu(*CLAMPED, 1), 2880, BF16, False, False),
    ("clamped in blocks of 32", Glu(*CLAMPED, 32), 2880, BF16, False, False),
    ("scaled clamped", Glu(*CLAMPED, 1), 2880, BF16, True, False),
    ("situ", Glu(SoftCappedSwish(4.0), SoftCap(25.0), 32), 2048, BF16, False, False),
    ("geglu", Glu(GeluTanh()), 16384, BF16, False, True),
    ("scaled srelu", SquaredRelu(), 2048, BF16, True, False),
    ("scaled tanh srelu", SoftCappedSquaredRelu(8.0), 2048, BF16, True, False),
):
    size, y = f"{name} {cols} {dtype}", empty(ROWS, cols, dtype=dtype)
    more = 1 if isinstance(product, Glu) else 0  # tensors of x and dx beyond the gates
    how = {"product": product, "scaled": scaled}
    SHIPPED.ship(f"{size} forward", 2 + more, forward, y, **how)
    SHIPPED.ship(f"{size} backward", 3 + 2 * more, backward, y, **how)
    if with_y:
        SHIPPED.ship(f"{size} backward with y", 4 + 2 * more, backward, y, **how, want_y=True)
SHIPPED.ship("in place", 5, in_place, empty(ROWS, 14336), product=SWIGLU)

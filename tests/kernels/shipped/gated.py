"""Launches of gated activations in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from opfuser.kernels.capped_functions import ClampedSwish, ShiftedClamp, SoftCap, SoftCappedSwish
from opfuser.kernels.functions import GeluTanh, SquaredRelu, Swish
from opfuser.kernels.gated import (
    Glu,
    ProductSpec,
    gated_backward,
    gated_backward_,
    gated_forward,
    product_spec,
)
from opfuser.kernels.scalar import ScalarFunction

ROWS = 4096
Functions = tuple[ScalarFunction, ScalarFunction | None] | ScalarFunction
SWIGLU: Functions = Swish(), None
GEGLU: Functions = GeluTanh(), None
SITU: Functions = SoftCappedSwish(4.0), SoftCap(25.0)
CLAMPED: Functions = ClampedSwish(1.702, 7.0), ShiftedClamp(7.0, 1.0)
SRELU: Functions = SquaredRelu()

LAUNCHES: dict[str, Callable[[], object]] = {}
TRAFFIC: dict[str, int] = {}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def spec(product: Functions, interleave: int) -> ProductSpec:
    if isinstance(product, ScalarFunction):
        return product_spec(product)
    return product_spec(Glu(*product, interleave or None))


def forward(
    product: Functions, cols: int, dtype: torch.dtype, interleave: int, scaled: bool
) -> object:
    x = tensor(ROWS, cols if isinstance(product, ScalarFunction) else 2 * cols, dtype=dtype)
    scales = tensor(ROWS, dtype=dtype) if scaled else None
    return gated_forward(x, spec(product, interleave), scales)


def backward(
    product: Functions,
    cols: int,
    dtype: torch.dtype,
    interleave: int,
    scaled: bool,
    *,
    y: bool = False,
    in_place: bool = False,
) -> object:
    dy = tensor(ROWS, cols, dtype=dtype)
    x = tensor(ROWS, cols if isinstance(product, ScalarFunction) else 2 * cols, dtype=dtype)
    scales = tensor(ROWS, dtype=dtype) if scaled else None
    if in_place:
        return gated_backward_(dy, x, spec(product, interleave), scales, y)
    return gated_backward(dy, x, spec(product, interleave), scales, True, y)


def add(
    name: str,
    product: Functions,
    cols: int,
    dtype: torch.dtype = torch.bfloat16,
    interleave: int = 0,
    *,
    scaled: bool = False,
    again: bool = False,
) -> None:
    """Forward and backward; ``again``: also the backward that emits y."""
    size = f"{name} {cols} {dtype} {interleave}"
    unit = ROWS * cols * dtype.itemsize
    more = 0 if isinstance(product, ScalarFunction) else 1  # tensors of x and dx beyond the gates
    arguments = product, cols, dtype, interleave, scaled
    LAUNCHES[f"{size} forward"] = partial(forward, *arguments)
    TRAFFIC[f"{size} forward"] = (2 + more) * unit
    LAUNCHES[f"{size} backward"] = partial(backward, *arguments)
    TRAFFIC[f"{size} backward"] = (3 + 2 * more) * unit
    if again:
        LAUNCHES[f"{size} backward with y"] = partial(backward, *arguments, y=True)
        TRAFFIC[f"{size} backward with y"] = (4 + 2 * more) * unit


for cols in (3584, 14336, 11008):
    add("swiglu", SWIGLU, cols, again=True)
add("swiglu", SWIGLU, 3584, torch.float32, again=True)
for dtype in (torch.bfloat16, torch.float32):
    add("scaled swiglu", SWIGLU, 2048, dtype, scaled=True)
for interleave in (1, 32):
    add("clamped", CLAMPED, 2880, interleave=interleave)
add("scaled clamped", CLAMPED, 2880, interleave=1, scaled=True)
add("situ", SITU, 2048, interleave=32)
add("geglu", GEGLU, 16384, again=True)
add("scaled srelu", SRELU, 2048, scaled=True)
LAUNCHES["in place"] = partial(backward, SWIGLU, 14336, torch.bfloat16, 0, False, in_place=True)
TRAFFIC["in place"] = 5 * ROWS * 14336 * 2

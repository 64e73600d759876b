"""Launches of activations in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.activation import activation_backward, activation_forward
from opfuser.kernels.scalar import FunctionSpec, scalar_function
from tests.kernels.shipping import Family, empty

ROWS = 8192
GELU = scalar_function("gelu_tanh", ()).spec
SILU = scalar_function("swish", (1.0,)).spec
FUNCTIONS: dict[str, FunctionSpec] = {
    "gelu_erf": scalar_function("gelu_erf", ()).spec,
    "squared_relu": scalar_function("squared_relu", ()).spec,
    "softplus": scalar_function("softplus", (1.0, 20.0)).spec,
    "tanh": scalar_function("tanh", ()).spec,
}


def forward(x: Tensor, *, bias: bool = False) -> object:
    return activation_forward(x, GELU, torch.empty_like(x[0]) if bias else None)


def backward(
    x: Tensor,
    *,
    function: FunctionSpec = GELU,
    bias: bool = False,
    db: bool = False,
    y: bool = False,
) -> object:
    b = torch.empty_like(x[0]) if bias else None
    return activation_backward(torch.empty_like(x), x, function, b, True, db, y)


SHIPPED = Family()
for dtype in (torch.bfloat16, torch.float32):
    for cols in (1024, 4096, 16384):
        size, x = f"{cols} {dtype}", empty(ROWS, cols, dtype=dtype)
        SHIPPED.ship(f"forward {size}", 2, forward, x)
        SHIPPED.ship(f"bias {size}", 2, forward, x, bias=True)
        SHIPPED.ship(f"backward {size}", 3, backward, x)
        SHIPPED.ship(f"db {size}", 3, backward, x, db=True)
    for cols in (4096, 28672):
        x = empty(ROWS, cols, dtype=dtype)
        SHIPPED.ship(f"bias, db, y {cols} {dtype}", 4, backward, x, bias=True, db=True, y=True)
    x = empty(ROWS, 4096, dtype=dtype)
    SHIPPED.ship(f"y {dtype}", 4, backward, x, function=SILU, y=True)
for name, function in FUNCTIONS.items():
    SHIPPED.ship(f"{name} db", 3, backward, empty(ROWS, 4096), function=function, db=True)

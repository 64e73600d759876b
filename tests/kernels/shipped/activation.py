"""Launches of activations in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser import Softplus, Tanh
from opfuser.kernels.activation import activation_backward, activation_forward
from opfuser.kernels.functions import GeluErf, GeluTanh, SquaredRelu, Swish
from opfuser.kernels.scalar import FunctionSpec
from tests.kernels.shipping import Family, empty

ROWS = 8192
GELU = GeluTanh().spec
SILU = Swish().spec
FUNCTIONS: dict[str, FunctionSpec] = {
    "gelu_erf": GeluErf().spec,
    "squared_relu": SquaredRelu().spec,
    "softplus": Softplus().make_function().spec,
    "tanh": Tanh().make_function().spec,
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

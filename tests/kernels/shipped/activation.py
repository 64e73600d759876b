"""Launches of activations in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from opfuser.kernels.activation import activation_backward, activation_forward
from opfuser.kernels.scalar import FunctionSpec, scalar_function

ROWS = 8192
GELU = scalar_function("gelu_tanh", ()).spec
SILU = scalar_function("swish", (1.0,)).spec
FUNCTIONS: dict[str, FunctionSpec] = {
    "gelu_erf": scalar_function("gelu_erf", ()).spec,
    "squared_relu": scalar_function("squared_relu", ()).spec,
    "softplus": scalar_function("softplus", (1.0, 20.0)).spec,
    "tanh": scalar_function("tanh", ()).spec,
}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(cols: int, dtype: torch.dtype, *, function=GELU, bias: bool = False) -> object:
    x = tensor(ROWS, cols, dtype=dtype)
    return activation_forward(x, function, tensor(cols, dtype=dtype) if bias else None)


def backward(
    cols: int, dtype: torch.dtype, *, function=GELU, bias=False, dx=True, db=False, y=False
) -> object:
    x = tensor(ROWS, cols, dtype=dtype)
    b = tensor(cols, dtype=dtype) if bias else None
    dy = tensor(ROWS, cols, dtype=dtype)
    return activation_backward(dy, x, function, b, dx, db, y)


LAUNCHES: dict[str, Callable[[], object]] = {}
TRAFFIC: dict[str, int] = {}


def add(name: str, call: Callable[[], object], passes: int, cols: int, dtype: torch.dtype) -> None:
    LAUNCHES[name] = call
    TRAFFIC[name] = passes * ROWS * cols * dtype.itemsize


for dtype in (torch.bfloat16, torch.float32):
    for cols in (1024, 4096, 16384):
        size = f"{cols} {dtype}"
        add(f"forward {size}", partial(forward, cols, dtype), 2, cols, dtype)
        add(f"bias {size}", partial(forward, cols, dtype, bias=True), 2, cols, dtype)
        add(f"backward {size}", partial(backward, cols, dtype), 3, cols, dtype)
        add(f"db {size}", partial(backward, cols, dtype, db=True), 3, cols, dtype)
    for cols in (4096, 28672):
        size = f"{cols} {dtype}"
        again = partial(backward, cols, dtype, bias=True, db=True, y=True)
        add(f"bias, db, y {size}", again, 4, cols, dtype)
    add(f"y {dtype}", partial(backward, 4096, dtype, function=SILU, y=True), 4, 4096, dtype)
for name, function in FUNCTIONS.items():
    both = partial(backward, 4096, torch.bfloat16, function=function, db=True)
    add(f"{name} db", both, 3, 4096, torch.bfloat16)

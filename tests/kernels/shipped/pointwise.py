"""Launches of element-wise chains in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from opfuser.kernels import functions
from opfuser.kernels.pointwise import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Chain, Link
from opfuser.kernels.scalar import ScalarFunction

ROWS = 8192


def function(f: ScalarFunction) -> Link:
    return Link(FUNCTION, f"@scalar:{f.name}", f.parameters, f, linear=False)


GELU, SILU, RELU = map(function, (functions.GeluTanh(), functions.Swish(), functions.SquaredRelu()))
HALF = Link(FUNCTION, "@scalar:scale", (0.5,), functions.Scale(0.5))
DROPPED = Link(DROPOUT, parameters=(0.1,))
BIASED, ADDED, KEPT = Link(BIAS), Link(ADD), Link(KEEP)

# The passes over A elements that each direction may take: x and y, dy and dx; what is added or
# kept; what backward makes values from.
CHAINS: dict[str, tuple[list[Link], int, int]] = {
    "dropout": ([DROPPED], 2, 2),
    "dropout, add": ([DROPPED, ADDED], 3, 2),
    "bias, dropout, add": ([BIASED, DROPPED, ADDED], 3, 2),
    "bias, gelu": ([BIASED, GELU], 2, 3),
    "bias, gelu, scale, dropout": ([BIASED, GELU, HALF, DROPPED], 2, 3),
    "bias, silu, dropout, add": ([BIASED, SILU, DROPPED, ADDED], 3, 3),
    "relu, scale": ([RELU, HALF], 2, 3),
    "silu, add, gelu, bias": ([SILU, ADDED, KEPT, GELU, BIASED], 4, 5),
}
EVERY_SIZE = {"dropout", "bias, dropout, add", "bias, silu, dropout, add"}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operands(links: Sequence[Link], x: Tensor) -> list[Tensor | None]:
    # Each has memory of its own: what is read twice comes from a GPU's cache.
    made: dict[int, Callable[[], Tensor]] = {
        BIAS: lambda: torch.empty_like(x[0]),
        ADD: lambda: torch.empty_like(x),
        DROPOUT: lambda: tensor(1, dtype=torch.int64),
    }
    return [made[link.kind]() if link.kind in made else None for link in links]


def forward(links: Sequence[Link], cols: int, dtype: torch.dtype) -> object:
    x = tensor(ROWS, cols, dtype=dtype)
    return Chain(links).forward(x, operands(links, x), (dtype,) * len(links))


def backward(links: Sequence[Link], cols: int, dtype: torch.dtype) -> object:
    x = tensor(ROWS, cols, dtype=dtype)
    chain = Chain(links)
    given = [
        None if not reads else torch.empty_like(x) if link.kind == KEEP else operand
        for link, operand, reads in zip(links, operands(links, x), chain.reads)
    ]
    wanted: dict[int, torch.dtype | bool] = {BIAS: dtype, ADD: True}
    wants = (*(wanted.get(link.kind, False) for link in links), True)
    dtypes = (dtype,) * len(links)
    dy = torch.empty_like(x)
    return chain.backward(dy, x if chain.reads_x else None, given, wants, dtypes)


LAUNCHES: dict[str, Callable[[], object]] = {}
TRAFFIC: dict[str, int] = {}

for name, (links, ahead, back) in CHAINS.items():
    for cols in (1024, 4096, 16384) if name in EVERY_SIZE else (4096,):
        for dtype in (torch.bfloat16, torch.float32):
            for run, passes in ((forward, ahead), (backward, back)):
                call = f"{name}: {run.__name__} {cols} {dtype}"
                LAUNCHES[call] = partial(run, links, cols, dtype)
                TRAFFIC[call] = passes * ROWS * cols * dtype.itemsize

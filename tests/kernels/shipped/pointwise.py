"""Launches of element-wise chains in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opfuser.kernels import functions
from opfuser.kernels.pointwise import Chain
from opfuser.kernels.pointwise_plain import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Link
from opfuser.kernels.scalar import ScalarFunction
from tests.kernels.shipping import Family, empty, operands

ROWS = 8192


def function(f: ScalarFunction) -> Link:
    return Link(FUNCTION, f"@scalar:{f.name}", f.parameters, f, linear=False)


GELU, SILU, RELU = map(function, (functions.GeluTanh(), functions.Swish(), functions.SquaredRelu()))
HALF = Link(FUNCTION, "@scalar:scale", (0.5,), functions.Scale(0.5))
DROPPED = Link(DROPOUT, parameters=(0.1,))
BIASED, ADDED, KEPT = Link(BIAS), Link(ADD), Link(KEEP)

# The passes over x that each direction may take: x and y, dy and dx; what is added or kept; what
# backward makes values from.
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


def forward(x: Tensor, *, links: Sequence[Link]) -> object:
    return Chain(links).forward(x, operands(links, x), (x.dtype,) * len(links))


def backward(x: Tensor, *, links: Sequence[Link]) -> object:
    chain = Chain(links)
    given = [
        None if not reads else torch.empty_like(x) if link.kind == KEEP else operand
        for link, operand, reads in zip(links, operands(links, x), chain.reads)
    ]
    wanted: dict[int, torch.dtype | bool] = {BIAS: x.dtype, ADD: True}
    wants = (*(wanted.get(link.kind, False) for link in links), True)
    dy, dtypes = torch.empty_like(x), (x.dtype,) * len(links)
    return chain.backward(dy, x if chain.reads_x else None, given, wants, dtypes)


SHIPPED = Family()
for name, (links, ahead, back) in CHAINS.items():
    for cols in (1024, 4096, 16384) if name in EVERY_SIZE else (4096,):
        for dtype in (torch.bfloat16, torch.float32):
            x = empty(ROWS, cols, dtype=dtype)
            SHIPPED.ship(f"{name}: forward {cols} {dtype}", ahead, forward, x, links=links)
            SHIPPED.ship(f"{name}: backward {cols} {dtype}", back, backward, x, links=links)

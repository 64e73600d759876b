"""Launches of element-wise chains in the sizes of real models, and the bytes that they may move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from opfuser.kernels import scalar
from opfuser.kernels.pointwise import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Chain, Scale, Stage

ROWS = 8192


def function(f: scalar.ScalarFunction) -> Stage:
    return Stage(FUNCTION, f"@scalar:{f.name}", f.parameters, f, linear=False)


GELU, SILU, RELU = map(function, (scalar.GeluTanh(), scalar.Swish(), scalar.SquaredRelu()))
HALF = Stage(FUNCTION, "@pointwise:scale", (0.5,), Scale(0.5))
DROPPED = Stage(DROPOUT, parameters=(0.1,))
BIASED, ADDED, KEPT = Stage(BIAS), Stage(ADD), Stage(KEEP)

# The passes over A elements that each direction may take: x and y, dy and dx; what is added or
# kept; what backward makes values from.
CHAINS: dict[str, tuple[list[Stage], int, int]] = {
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


def operands(stages: Sequence[Stage], x: Tensor) -> list[Tensor | None]:
    # Each has memory of its own: what is read twice comes from a GPU's cache.
    made: dict[int, Callable[[], Tensor]] = {
        BIAS: lambda: torch.empty_like(x[0]),
        ADD: lambda: torch.empty_like(x),
        DROPOUT: lambda: tensor(1, dtype=torch.int64),
    }
    return [made[stage.kind]() if stage.kind in made else None for stage in stages]


def forward(stages: Sequence[Stage], cols: int, dtype: torch.dtype) -> object:
    x = tensor(ROWS, cols, dtype=dtype)
    return Chain(stages).forward(x, operands(stages, x), (dtype,) * len(stages))


def backward(stages: Sequence[Stage], cols: int, dtype: torch.dtype) -> object:
    x = tensor(ROWS, cols, dtype=dtype)
    chain = Chain(stages)
    given = [
        None if not reads else torch.empty_like(x) if stage.kind == KEEP else operand
        for stage, operand, reads in zip(stages, operands(stages, x), chain.reads)
    ]
    wanted: dict[int, torch.dtype | bool] = {BIAS: dtype, ADD: True}
    wants = (*(wanted.get(stage.kind, False) for stage in stages), True)
    dtypes = (dtype,) * len(stages)
    dy = torch.empty_like(x)
    return chain.backward(dy, x if chain.reads_x else None, given, wants, dtypes)


LAUNCHES: dict[str, Callable[[], object]] = {}
TRAFFIC: dict[str, int] = {}

for name, (stages, ahead, back) in CHAINS.items():
    for cols in (1024, 4096, 16384) if name in EVERY_SIZE else (4096,):
        for dtype in (torch.bfloat16, torch.float32):
            for run, passes in ((forward, ahead), (backward, back)):
                call = f"{name}: {run.__name__} {cols} {dtype}"
                LAUNCHES[call] = partial(run, stages, cols, dtype)
                TRAFFIC[call] = passes * ROWS * cols * dtype.itemsize

"""Launches of cross entropy in the sizes of real vocabularies, and the bytes that they may move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from opfuser.kernels.cross_entropy import (
    Terms,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_gradient,
    cross_entropy_mean,
    scaled,
)

ROWS = 2048
IGNORE = -100


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def targets() -> Tensor:
    return tensor(ROWS, dtype=torch.int64)


def count() -> Tensor:
    return tensor(dtype=torch.int64)


def forward(cols: int, dtype: torch.dtype, smoothing: float) -> object:
    x = tensor(ROWS, cols, dtype=dtype)
    return cross_entropy_forward(x, targets(), Terms(IGNORE, smoothing, 0.0))


def backward(cols: int, dtype: torch.dtype, smoothing: float) -> object:
    x, row = tensor(ROWS, cols, dtype=dtype), tensor(ROWS)
    return cross_entropy_backward(
        x, targets(), row, row, tensor(), count(), Terms(IGNORE, smoothing, 0.0)
    )


def gradient(cols: int, dtype: torch.dtype, smoothing: float) -> object:
    x = tensor(ROWS, cols, dtype=dtype)
    return cross_entropy_gradient(x, targets(), count(), Terms(IGNORE, smoothing, 0.0))


def scale(dtype: torch.dtype, to: torch.dtype, in_place: bool) -> object:
    return scaled(tensor(ROWS, 4096, dtype=dtype), tensor(), None, to, in_place=in_place)


LAUNCHES: dict[str, Callable[[], object]] = {
    "mean": lambda: cross_entropy_mean(tensor(ROWS), targets(), IGNORE)
}
# The targets are read too.
TRAFFIC: dict[str, int] = {"mean": ROWS * (4 + 8) + 4 + 8}

# Passes over the logits. The gradient that takes their place may read them twice: where they come
# from the second time is the cache's affair.
for call, passes in ((forward, 1), (backward, 2), (gradient, 3)):
    for cols, dtype, smoothing in (
        (1000, torch.bfloat16, 0.0),
        (1000, torch.float32, 0.1),
        (50257, torch.bfloat16, 0.1),
        (50257, torch.float32, 0.0),
        (128256, torch.bfloat16, 0.0),
        (128256, torch.float32, 0.0),
        (262144, torch.bfloat16, 0.1),
    ):
        name = f"{call.__name__} {cols} {dtype} {smoothing}"
        LAUNCHES[name] = partial(call, cols, dtype, smoothing)
        TRAFFIC[name] = passes * ROWS * cols * dtype.itemsize

for dtype, to, in_place in (
    (torch.bfloat16, torch.bfloat16, True),
    (torch.float32, torch.float32, True),
    (torch.float32, torch.float16, False),
):
    LAUNCHES[f"scale {dtype} {to}"] = partial(scale, dtype, to, in_place)
    TRAFFIC[f"scale {dtype} {to}"] = ROWS * 4096 * (dtype.itemsize + to.itemsize)

"""Launches of cross entropy in the sizes of real vocabularies, and the bytes that they may move."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from opfuser.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_gradient,
    cross_entropy_mean,
    scaled,
)
from opfuser.kernels.cross_entropy_plain import RowLosses, Terms
from opfuser.kernels.vocabulary_slices import (
    Classes,
    slice_gradient,
    slice_statistics,
)
from tests.kernels.shipping import Family, Shipped, empty

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 2048
IGNORE = -100
TARGETS, COUNT = empty(ROWS, dtype=torch.int64), empty(dtype=torch.int64)
OF_ROWS, NUMBER = empty(ROWS, dtype=FP32), empty(dtype=FP32)


def forward(x: Tensor, *, terms: Terms) -> object:
    return cross_entropy_forward(x, TARGETS, terms)


def backward(x: Tensor, *, terms: Terms) -> object:
    return cross_entropy_backward(x, TARGETS, OF_ROWS, OF_ROWS, NUMBER, COUNT, terms)


def gradient(x: Tensor, *, terms: Terms) -> object:
    return cross_entropy_gradient(x, TARGETS, COUNT, terms)


CLASSES = Classes(32064, 128256)  # those of the second of four ranks


def statistics(x: Tensor, *, terms: Terms) -> object:
    return slice_statistics(x, TARGETS, terms, CLASSES)


def of_slice(x: Tensor, *, terms: Terms) -> object:
    row = RowLosses(OF_ROWS, OF_ROWS, OF_ROWS)
    return slice_gradient(x, TARGETS, row, NUMBER, COUNT, terms, CLASSES, True)


SHIPPED = Family()
# The targets are read too.
SHIPPED["mean"] = Shipped(
    partial(cross_entropy_mean, OF_ROWS, TARGETS, IGNORE), ROWS * (4 + 8) + 4 + 8
)
# Passes over the logits. The gradient that takes their place may read them twice: where they come
# from the second time is the cache's affair.
for call, passes in ((forward, 1), (backward, 2), (gradient, 3)):
    for cols, dtype, smoothing in (
        (1000, BF16, 0.0),
        (1000, FP32, 0.1),
        (50257, BF16, 0.1),
        (50257, FP32, 0.0),
        (128256, BF16, 0.0),
        (128256, FP32, 0.0),
        (262144, BF16, 0.1),
    ):
        name, terms = f"{call.__name__} {cols} {dtype} {smoothing}", Terms(IGNORE, smoothing, 0.0)
        SHIPPED.ship(name, passes, call, empty(ROWS, cols, dtype=dtype), terms=terms)
for call, passes in ((statistics, 1), (of_slice, 2)):
    for cols, dtype, smoothing in ((32064, BF16, 0.0), (32063, FP32, 0.1)):
        name, terms = f"{call.__name__} {cols} {dtype} {smoothing}", Terms(IGNORE, smoothing, 0.0)
        SHIPPED.ship(name, passes, call, empty(ROWS, cols, dtype=dtype), terms=terms)
for dtype, to, in_place in ((BF16, BF16, True), (FP32, FP32, True), (FP32, FP16, False)):
    x = empty(ROWS, 4096, dtype=dtype)
    SHIPPED[f"scale {dtype} {to}"] = Shipped(
        partial(scaled, x, NUMBER, None, to, in_place=in_place), x.nbytes + x.numel() * to.itemsize
    )

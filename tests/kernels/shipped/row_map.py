"""Launches between tokens and rows of experts in the sizes of models, and the bytes they may move.

Each tensor counts once, however often a token has to be read or written: what is moved is what a
copy of tokens and rows moves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.row_map import copy_to_rows, sort_by_expert, sum_of_rows, sum_of_rows_grads
from tests.kernels.shipping import Family, empty

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = 4096


def choices(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row map, weights and rows of tokens like x."""
    row_map = empty(len(x), k, dtype=torch.int64)
    return row_map, empty(len(x), k, dtype=FP32), empty(len(x) * k, x.shape[1], dtype=x.dtype)


def copies(x: Tensor, *, k: int, weighted: bool) -> object:
    row_map, weights, _ = choices(x, k)
    return copy_to_rows(x, row_map, weights if weighted else None)


def sums(x: Tensor, *, k: int, weighted: bool, values: bool) -> object:
    row_map, weights, rows = choices(x, k)
    of_rows = weights.new_empty(len(rows)) if values else None
    return sum_of_rows(rows, row_map, weights if weighted else None, of_rows)


def sort(indices: Tensor, *, experts: int) -> object:
    return sort_by_expert(indices, experts)


def grads(dy: Tensor, *, k: int, dw: bool) -> object:
    row_map, weights, rows = choices(dy, k)
    return sum_of_rows_grads(dy, row_map, weights, rows if dw else None, True)


SHIPPED = Family()
for cols, k, dtype in (
    (2048, 8, BF16),
    (4096, 2, BF16),
    (7168, 8, BF16),
    (2880, 4, BF16),
    (2048, 1, FP32),
):
    x, name = empty(TOKENS, cols, dtype=dtype), f"{cols} {k} {dtype}"
    SHIPPED.ship(f"copies {name}", 1 + k, copies, x, k=k, weighted=False)
    SHIPPED.ship(f"copies with weights {name}", 1 + k, copies, x, k=k, weighted=True)
    SHIPPED.ship(f"sums {name}", 1 + k, sums, x, k=k, weighted=False, values=False)
    SHIPPED.ship(f"sums with values {name}", 1 + k, sums, x, k=k, weighted=False, values=True)
    SHIPPED.ship(f"weighted sums {name}", 1 + k, sums, x, k=k, weighted=True, values=False)
    SHIPPED.ship(f"gradients {name}", 1 + k, grads, x, k=k, dw=False)
    SHIPPED.ship(f"gradients with weights {name}", 1 + 2 * k, grads, x, k=k, dw=True)
for experts, k, dtype in ((128, 8, torch.int64), (8, 2, torch.int64), (256, 8, torch.int64)):
    indices = empty(16384, k, dtype=dtype)
    # Indices are read twice, and a map is written; histograms are written and read.
    passes = 2 + 8 / dtype.itemsize + 2 * 128 * experts * 4 / indices.nbytes
    SHIPPED.ship(f"sort of {experts} {k} {dtype}", passes, sort, indices, experts=experts)

"""The biases of groups of rows: added, and differentiated.

Symbols: T rows, G groups, N columns.
"""

from __future__ import annotations

from torch import Tensor

from ..gemm import RowGroups


def grouped_bias(table: Tensor, scales: Tensor | None, groups: RowGroups, rows: int) -> Tensor:
    """``s b[group]`` for each row: (G, N) -> (T, N)."""
    added = groups.spread(table, rows)
    return added if scales is None else added * scales.reshape(-1, 1)


def grouped_bias_grad(dy: Tensor, scales: Tensor | None, groups: RowGroups) -> Tensor:
    """``db[g] = Σ s dy`` over the rows of g: (T, N) -> (G, N), in fp32 for fp16 and bf16."""
    dy = _wide(dy)
    return groups.sum(dy if scales is None else dy * scales.reshape(-1, 1))


def scale_grad(dy: Tensor, table: Tensor, groups: RowGroups) -> Tensor:
    """``ds = b[group] · dy`` for each row: (T, N), (G, N) -> (T,), in fp32 for fp16 and bf16."""
    return (_wide(dy) * groups.spread(table, dy.shape[0])).sum(-1)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.itemsize == 2 else x

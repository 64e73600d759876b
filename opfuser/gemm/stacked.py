"""Products with a weight that consists of several matrices, one after another.

Symbols as in :mod:`.products`; N = Σ N_i. Where the matrices lie one behind another, products take
them as one instead.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..kernels.scalar import cast
from ..runtime.tracing import columns as columns_of
from ..runtime.tracing import functional, joined_columns
from .operands import Operand, Stacked, as_rows


def stacked_forward(
    x: Operand,
    w: Stacked,
    bias: Tensor | None,
    *,
    scale: float | None,
    add: Tensor | None,
    in_place: bool,
) -> Tensor:
    """``y = s x Wᵀ + b + z``, of which each GEMM writes its columns; args as of ``forward``."""
    if functional():
        parts = [linear(x, m) for m in w.matrices]
        parts = parts if scale is None else [y * scale for y in parts]
        for term in (bias, add):
            if term is not None:
                parts = [y + t for y, t in zip(parts, columns_of(term, w.sizes))]
        return joined_columns(parts)
    rows, alpha = as_rows(x), 1 if scale is None else scale
    in_place = in_place and add is not None and add.is_contiguous()
    if add is None:
        y = rows.new_empty(rows.shape[0], w.shape[0])
    else:
        y = as_rows(add)
        y = y if in_place else y.clone(memory_format=torch.contiguous_format)
        y = y if bias is None else y.add_(bias)
    sizes = w.sizes
    columns = y.split_with_sizes(sizes, 1)  # a microsecond for each less than by indexing
    if add is None and bias is not None:
        for m, out, b in zip(w.matrices, columns, bias.split_with_sizes(sizes)):
            torch.addmm(b, rows, m.t(), alpha=alpha, out=out)
    else:
        for m, out in zip(w.matrices, columns):
            out.addmm_(rows, m.t(), beta=int(add is not None), alpha=alpha)
    if in_place and add is not None:
        return add
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def stacked_dgrad(
    dy: Operand, w: Stacked, *, scale: float | None, add: Tensor | None, in_place: bool
) -> Tensor:
    """``dx = s dy W + g``, to which each GEMM adds its term; args as of ``dgrad``."""
    dy = cast(dy, w.dtype)
    if add is not None and add.dtype != w.dtype:
        return stacked_dgrad(dy, w, scale=scale, add=None, in_place=False) + add
    if functional():
        terms: list[Tensor] = [a @ m for a, m in zip(columns_of(dy, w.sizes), w.matrices)]
        dx = terms[0]
        for term in terms[1:]:
            dx = dx + term
        dx = dx if scale is None else dx * scale
        return dx if add is None else dx + add
    rows, alpha = as_rows(dy), 1 if scale is None else scale
    in_place = in_place and add is not None and add.is_contiguous()
    if add is None:
        dx = rows.new_empty(rows.shape[0], w.shape[1])
    else:
        dx = as_rows(add)
        dx = dx if in_place else dx.clone(memory_format=torch.contiguous_format)
    beta = int(add is not None)
    for m, columns in zip(w.matrices, rows.split_with_sizes(w.sizes, 1)):
        dx.addmm_(columns, m, beta=beta, alpha=alpha)
        beta = 1
    if in_place and add is not None:
        return add
    return dx if dy.dim() == 2 else dx.view(*dy.shape[:-1], dx.shape[1])

"""Products with a weight that is a matrix plus products of low rank, which are never added to it.

Symbols as in :mod:`.products`. For W + Σ s_i B_i A_i, with A_i (r_i, K), B_i (N_i, r_i) and N_i
columns of the output from ``start`` on:

    y = x Wᵀ + Σ s_i u_i B_iᵀ,   u_i = d_i(x) A_iᵀ
    dx = dy W + Σ d_i(du_i A_i), du_i = s_i dy B_i
    dA_i = du_iᵀ d_i(x),         dB_i = s_i dyᵀ u_i

d_i zeroes and scales entries by a mask, and is linear and symmetric. All A_i without one are one
matrix in u, dx and dA. Products of low rank are computed in the wider of the dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.dropout_masks import masked
from ..runtime.tracing import keeps_products
from .operands import Adapter, LowRank, as_rows, mm


def _a_of(adapters: Sequence[Adapter]) -> Tensor:
    """The A_i, one behind another."""
    return adapters[0].a if len(adapters) == 1 else torch.cat([a.a for a in adapters])


def _groups(w: LowRank) -> list[list[Adapter]]:
    """Adapters without a mask together, the others one by one."""
    plain = [a for a in w.adapters if a.mask is None]
    return [g for g in (plain, *([a] for a in w.adapters if a.mask is not None)) if g]


def _columns(t: Tensor, a: Adapter) -> Tensor:
    """Columns of rows that belong to an adapter."""
    size = a.b.shape[0]
    return t if size == t.shape[1] else t.narrow(1, a.start, size)


def _down(x: Tensor, group: Sequence[Adapter]) -> Sequence[Tensor]:
    """The u_i of a group, of rows x that its mask was applied to."""
    u = x @ _a_of(group).t()
    return [u] if len(group) == 1 else u.split_with_sizes([a.a.shape[0] for a in group], 1)


def _up_grads(dy: Tensor, group: Sequence[Adapter], scale: float) -> Tensor:
    """The du_i of a group side by side."""
    found = [mm(_columns(dy, a), a.b, a.scale * scale) for a in group]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _applied(t: Tensor, of: Adapter) -> Tensor:
    """``d(t)``."""
    mask = of.mask
    if mask is None:
        return t
    return masked(t, mask.view(t.shape) if mask.dtype == torch.bool else mask, of.p)


class _Term(NamedTuple):
    """``α a b``, added to the columns of one adapter, or to all; or ``d(α a b)`` of another."""

    a: Tensor
    b: Tensor
    alpha: float = 1.0
    of: Adapter | None = None
    d: Adapter | None = None


def _plus(t: Tensor, terms: Iterable[_Term], dtype: torch.dtype) -> Tensor:
    """``t`` and the terms, summed in ``dtype``: in place, where nothing forbids that."""
    rows, traced = as_rows(t), keeps_products()
    wide = rows.to(dtype)
    for a, b, alpha, of, d in terms:
        if not traced and (d is None or d.mask is None):
            columns = wide if of is None else _columns(wide, of)
            columns.addmm_(a, b, alpha=alpha)
            continue
        term = a @ b if alpha == 1.0 else (a @ b) * alpha
        term = term if d is None else _applied(term, d)
        if not traced:
            wide.add_(term)
            continue
        if of is not None:
            term = F.pad(term, (of.start, wide.shape[1] - of.start - term.shape[1]))
        wide = wide + term
    if traced:
        return wide.to(t.dtype).view(t.shape)
    if wide is not rows:
        rows.copy_(wide)
    return t


def add_low_rank(y: Tensor, x: Tensor, w: LowRank, scale: float | None) -> Tensor:
    """``y + s Σ s_i u_i B_iᵀ``, in place unless a trace forbids that, in the dtype of y."""
    if not w.adapters:
        return y
    dtype, s = w.adapters[0].a.dtype, 1.0 if scale is None else scale
    x = as_rows(x).to(dtype)
    terms = (
        _Term(u, a.b.t(), a.scale * s, of=a)
        for group in _groups(w)
        for a, u in zip(group, _down(_applied(x, group[0]), group))
    )
    return _plus(y, terms, dtype)


def add_low_rank_dgrad(dx: Tensor, dy: Tensor, w: LowRank, scale: float | None) -> Tensor:
    """``dx + s Σ d_i(du_i A_i)``, in place unless a trace forbids that, in the dtype of dx."""
    if not w.adapters:
        return dx
    dtype, s = w.adapters[0].a.dtype, 1.0 if scale is None else scale
    dy = as_rows(dy).to(dtype)
    terms = (_Term(_up_grads(dy, group, s), _a_of(group), d=group[0]) for group in _groups(w))
    return _plus(dx, terms, dtype)


def low_rank_wgrad(
    dy: Tensor, x: Tensor, w: LowRank, needed: Sequence[tuple[bool, bool]], scale: float | None
) -> list[tuple[Tensor | None, Tensor | None]]:
    """For each adapter dA_i and dB_i times s, each None if it is not needed."""
    if not any(map(any, needed)):
        return [(None, None)] * len(needed)
    dtype, alpha = w.adapters[0].a.dtype, 1.0 if scale is None else scale
    dy, x = as_rows(dy).to(dtype), as_rows(x).to(dtype)
    wanted = {id(a): need for a, need in zip(w.adapters, needed)}
    found: dict[int, tuple[Tensor | None, Tensor | None]] = {}
    for group in _groups(w):
        given = _applied(x, group[0])
        dbs: list[Tensor | None] = [None] * len(group)
        das: Sequence[Tensor | None] = [None] * len(group)
        if any(wanted[id(a)][0] for a in group):
            da = _up_grads(dy, group, alpha).t() @ given
            das = [da] if len(group) == 1 else da.split_with_sizes([a.a.shape[0] for a in group])
        if any(wanted[id(a)][1] for a in group):
            for n, (a, u) in enumerate(zip(group, _down(given, group))):
                if wanted[id(a)][1]:
                    dbs[n] = mm(_columns(dy, a).t(), u, a.scale * alpha)
        for a, da_i, db_i in zip(group, das, dbs):
            found[id(a)] = da_i if wanted[id(a)][0] else None, db_i
    return [found[id(a)] for a in w.adapters]

"""Heads side by side: the columns that they are taken from, and what is done to all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .dataflow import Value
from .heads import HeadsFound, Turn
from .kept import KeptError
from .operations import HeadNorm, Heads, Norm, Operation, Reorder, Rotary


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """Sizes of the columns (heads, entries) of queries, keys and values."""
    heads = Heads(len(q), len(k), q.shape[1], v.shape[1])
    if len(k) != len(v) or heads.queries % heads.keys or k.shape[1] != heads.size:
        raise KeptError("has numbers or sizes of heads that do not fit")
    return heads


def side_by_side(parts: Sequence[HeadsFound]) -> tuple[tuple[Value, ...], int, list[Tensor]]:
    """(all projections, how many columns they have, those that each part consists of)."""
    sources = tuple(dict.fromkeys(source for part in parts for source in part.sources))
    widths = [source.shape[-1] for source in sources]
    places = dict(zip(sources, torch.arange(sum(widths)).split(widths)))
    orders = [torch.cat([places[s] for s in p.sources])[p.columns].flatten() for p in parts]
    return sources, sum(widths), orders


def packed(parts: Sequence[HeadsFound]) -> tuple[tuple[Value, ...], tuple[Operation, ...]]:
    """(all projections, what makes heads of several parts of them, one behind another)."""
    sources, total, orders = side_by_side(parts)
    return sources, gathered(torch.cat(orders), total)


def gathered(order: Tensor, total: int) -> tuple[Operation, ...]:
    """What takes columns of so many, in an order, in the largest blocks that there are."""
    if torch.equal(order, torch.arange(total)):
        return ()
    starts = [0, *((order.diff() != 1).nonzero().flatten() + 1).tolist()]
    size = math.gcd(total, len(order), *starts, *order[starts].tolist())
    return (Reorder(tuple((order[::size] // size).tolist()), size, total // size),)


def distinct(found: HeadsFound) -> Tensor:
    """The columns of key or value heads, of which several queries' heads may read the same."""
    columns = found.columns
    share = int((columns == columns[:1]).all(-1).sum())
    if not torch.equal(columns, columns[::share].repeat_interleave(share, 0)):
        raise KeptError("repeats its heads in an unknown order")
    return columns[::share]


def shared_steps(q: HeadsFound, k: HeadsFound, heads: Heads) -> list[Operation]:
    """Norms and rotations of queries and keys, which have to be alike."""
    out: list[Operation] = []
    if len(q.steps) != len(k.steps):
        raise KeptError("normalizes or turns queries and keys differently")
    for ours, theirs in zip(q.steps, k.steps):
        if isinstance(ours, Turn) and ours == theirs:
            out.append(Rotary(heads, *ours[:-1]))
        elif isinstance(ours, Norm) and isinstance(theirs, Norm):
            out.append(_head_norm(ours, theirs, heads))
        else:
            raise KeptError("normalizes or turns queries and keys differently")
    return out


def _head_norm(q: Norm, k: Norm, heads: Heads) -> HeadNorm:
    if not heads.keys:
        raise KeptError("opfuser has no operation for norms of heads beside values of another size")
    alike = replace(q, weight=None, bias=None) == replace(k, weight=None, bias=None)
    unweighted = q.zero_centered_weight and (q.centered or None in (q.weight, k.weight))
    if not alike or unweighted:
        raise KeptError("opfuser has no operation for such norms of queries and keys")
    how = q.zero_centered_weight, q.weight_is_cast, q.centered
    return HeadNorm(heads, q.eps, q.weight, k.weight, *how, q.bias, k.bias)

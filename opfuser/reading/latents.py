"""Latent attention with a cache: it keeps what keys and values are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .dataflow import Node, Value
from .heads import HeadsFound, heads_of
from .kept import KeptError
from .operations import Heads, Operation
from .packing import gathered, shared_steps, side_by_side
from .scores import Core
from .values import Values, computed


@dataclass(frozen=True)
class LatentsFound:
    """What keys and values are made of that a cache returns.

    Attributes:
        update: of the cache, by two tensors of one head.
        sources: what it returns, and projections of that, side by side.
        taken: what takes columns of each of these.
    """

    update: Node
    sources: tuple[Value, ...]
    taken: tuple[tuple[Operation, ...], ...]


def update_before(values: Values, k: Value, v: Value) -> Node | None:
    """The update of a cache that keys or values are made of."""
    for node in values.dataflow.nodes:
        of_it = (values.is_ancestor(result, at) for result in node.results for at in (k, v))
        if node.op == "cache.update" and any(of_it):
            return node
    return None


def latent_heads(
    values: Values,
    core: Core,
    update: Node,
    projected: Callable[[Value], Value | None],
    tokens: tuple[int, int],
) -> tuple[HeadsFound, HeadsFound]:
    """Keys and values that are made of what an update of a cache returns.

    Args:
        values: of the dataflow.
        core: what keys and values are.
        update: of the cache.
        projected: the input of a projection, of what it returns; None for others.
        tokens: of the queries.

    Raises:
        KeptError: they are made of anything else, or it keeps anything else.
    """
    results, length = update.results, update.results[0].shape[2]

    def made_of_kept(at: Value) -> Value | None:
        return at if at in results else projected(at)

    # With causality, what lies behind as many keys as there are queries is seen by none.
    at_most = length if core.causal else None
    k = heads_of(values, core.k, made_of_kept, transposed=core.transposed, length=at_most)
    u = heads_of(values, core.v, made_of_kept, length=at_most)
    if not k.inputs | u.inputs <= set(results):
        raise KeptError(computed(core.k, "attends beside its cache to keys that are made by"))
    if k.tokens[1] not in (tokens[1], length):
        raise KeptError(computed(core.k, "attends to some of what its cache returns, by"))
    if k.steps:
        raise KeptError(computed(core.k, "normalizes or turns what its cache returns, by"))
    if any(given.shape != (tokens[0], 1, tokens[1], given.shape[-1]) for given in update.args):
        raise KeptError("has a cache keep other tokens than its queries, or several heads")
    if len({given.meta.dtype for given in update.args}) > 1:
        raise KeptError("has a cache keep tensors of two dtypes")
    return k, u


def latents_of(
    heads: Heads, parts: Sequence[HeadsFound], update: Node
) -> tuple[LatentsFound, tuple[tuple[Operation, ...], ...]]:
    """What is taken of a cache's results, and what makes queries, and keys and values of that."""
    q, k, u = parts
    if q.order:  # the order in which queries turn; keys have turned in that of the module
        k = replace(k, columns=k.columns[:, list(q.order)])
    sources, total, orders = side_by_side([k, u])
    every, taken = torch.cat(orders), []
    places = torch.full((total,), -1)
    start = count = 0
    for source in sources:
        width = source.shape[-1]
        columns = torch.arange(width)
        if source in update.results:  # of which projections take columns by themselves
            used = dict.fromkeys((every - start).tolist())
            columns = torch.tensor([column for column in used if 0 <= column < width])
        places[start + columns] = torch.arange(count, count + len(columns))
        taken.append(gathered(columns, width))
        start, count = start + width, count + len(columns)
    _, width, (order,) = side_by_side([q])
    alone = Heads(heads.queries, 0, heads.size, heads.size)
    queries = *gathered(order, width), *shared_steps(q, q, alone)
    branches = queries, *(gathered(places[each], count) for each in orders)
    return LatentsFound(update, sources, tuple(taken)), branches

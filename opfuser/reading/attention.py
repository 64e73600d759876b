"""Attention: what of it is computed, from the output of its heads back to their projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .dataflow import Node, Value
from .heads import HeadsFound, heads_of
from .kept import KeptError
from .latents import LatentsFound, latent_heads, latents_of, update_before
from .masks import conditions_of, masks_of
from .operations import Attention, Heads, Operation, Weights
from .packing import distinct, gathered, packed, shared_steps, side_by_side, sizes_of
from .replay import indices_like, origin_of, source_of
from .scores import Core, core_of
from .values import Values, computed


@dataclass(frozen=True)
class AttentionFound:
    """Attention, and the projections that its packed input consists of.

    Attributes:
        attention: of the packed heads.
        steps: what orders, normalizes and turns heads before, of all that ``sources`` hold.
        branches: what makes queries, keys and values if they are not packed; empty if they are.
        sources: the outputs of the projections, side by side; of the queries alone if there is a
            memory.
        memory: what keys and values are made of alone, side by side: with branches, of the same
            input, else the outputs of the projections of another one.
        memory_steps: what orders these.
        tokens: sizes of batch and sequence.
        once: the nodes that draw random numbers or update a cache.
        latents: how a cache returns the memory; None if it does not.
        returned: weights that the module returns.
        sequence_first: whether rows are those of a sequence of batches, as ``tokens`` says.
    """

    attention: Attention
    steps: tuple[Operation, ...]
    branches: tuple[tuple[Operation, ...], ...]
    sources: tuple[Value, ...]
    memory: tuple[Value, ...]
    memory_steps: tuple[Operation, ...]
    tokens: tuple[int, int]
    once: tuple[Node, ...]
    latents: LatentsFound | None = None
    returned: frozenset[Value] = frozenset()
    sequence_first: bool = False


def attention_of(
    values: Values, v: Value, projected: Callable[[Value], Value | None]
) -> AttentionFound | None:
    """The attention whose heads a value joins; None if it joins none.

    Raises:
        KeptError: something about it is not explained.
    """
    joined = source_of(values, v)
    places = None if joined is None else _by_head(joined, v)
    core = None if joined is None or places is None else core_of(values, joined)
    if joined is None or places is None or core is None:
        return None
    shares, count = _is_shared(v, joined, core), places.shape[1]
    sequence_first, *either = _orders_of(v, joined, places, shares)
    once = _nodes(joined) if core.dropout_p else ()
    order: Any = {"count": count, "sequence_first": sequence_first}
    q = heads_of(values, core.q, projected, shares=shares, **order)
    if either:
        rows = q.sources[0].shape[:-1]
        order["sequence_first"] = sequence_first = rows == q.tokens[::-1] != q.tokens
    update = _update_of(values, core, count)
    kept = None if update is not None else update_before(values, core.k, core.v)
    if kept is not None:
        k, u = latent_heads(values, core, kept, projected, q.tokens)
    else:
        transposed, given = core.transposed and update is None, (core.k, core.v)
        k_value, v_value = given if update is None else update.args
        k = heads_of(values, k_value, projected, transposed=transposed, **order)
        u = heads_of(values, v_value, projected, **order)
    is_cross = kept is None and k.inputs == u.inputs and k.inputs.isdisjoint(q.inputs)
    _check_keys(core, q, k, u, is_other=is_cross or kept is not None)
    if update is not None and (q.order or k.scale != 1):
        what = "turns the last entries of" if q.order else "scales the"
        raise KeptError(f"{what} keys that a cache keeps")
    if kept is not None and sequence_first:
        raise KeptError("exchanges batch and sequence beside a cache")
    once = once if update is None else (*once, update)
    k, u = (replace(f, columns=distinct(f)) for f in (k, u))
    heads = sizes_of(q.columns, k.columns, u.columns)
    masks, bias, causal = masks_of(values, core, count)
    conditions = conditions_of(values, core)
    if conditions and (update is not None or kept is not None):
        raise KeptError("hides keys that a cache keeps, by -inf")
    forks = not is_cross and bool(q.steps) and heads.size != heads.value_size
    unweighted = is_cross or shares or kept or forks or bias is not None
    returned = None if unweighted else _returned(values, core, update)
    attention = Attention(
        heads,
        core.scale * q.scale * k.scale,
        causal,
        core.dropout_p,
        core.softcap,
        masks,
        None if update is None else update.kwargs["layer"],
        core.sinks,
        bias,
        None if returned is None else _output(values, returned),
        conditions,
    )
    if kept is not None:
        latents, branches = latents_of(heads, (q, k, u), kept)
        both, once = (q.sources, latents.sources), (*once, kept)
        return AttentionFound(attention, (), branches, *both, (), q.tokens, once, latents)
    if not is_cross:
        found = _of_one_input(attention, (q, k, u), once)
    elif causal or update is not None or q.steps or k.steps:
        raise KeptError(computed(core.k, "normalizes, turns, caches or hides keys of an input, by"))
    else:
        (sources, steps), memory = packed([q]), packed([k, u])
        found = AttentionFound(attention, steps, (), sources, *memory, q.tokens, once)
    return replace(
        found,
        tokens=q.tokens[::-1] if sequence_first else q.tokens,
        returned=frozenset() if returned is None else frozenset({returned}),
        sequence_first=sequence_first,
    )


def _of_one_input(
    attention: Attention, parts: tuple[HeadsFound, ...], once: tuple[Node, ...]
) -> AttentionFound:
    """Attention of queries, keys and values whose projections are of one input."""
    heads, (q, k, _) = attention.heads, parts
    branches: tuple[tuple[Operation, ...], ...] = ()
    memory: tuple[Value, ...] = ()
    if q.steps and heads.size != heads.value_size:
        # Nothing turns queries and keys beside values of another size.
        sources, total, orders = side_by_side(parts)
        totals = [total] * 3
        if q.inputs != k.inputs:  # whose projections are no GEMM together
            sources, totals[0], first = side_by_side(parts[:1])
            memory, total, others = side_by_side(parts[1:])
            totals[1:], orders = [total] * 2, first + others
        alone = [Heads(count, 0, heads.size, heads.size) for count in (heads.queries, heads.keys)]
        turns = [*(shared_steps(q, k, each) for each in alone), ()]
        columns = [gathered(*each) for each in zip(orders, totals)]
        branches = tuple((*taken, *turn) for taken, turn in zip(columns, turns))
        steps: tuple[Operation, ...] = ()
    else:
        sources, steps = packed(parts)
        steps = *steps, *shared_steps(q, k, heads)
    return AttentionFound(attention, steps, branches, sources, memory, (), q.tokens, once)


def _orders_of(v: Value, joined: Value, places: Tensor, shares: bool) -> list[bool]:
    """Whether rows are of (s, b): False, True, or if one of these is 1, both.

    Raises:
        KeptError: heads are joined in another way.
    """
    orders = [places] if shares else [places.transpose(1, 2), places.permute(2, 0, 1, 3)]
    got = origin_of(v, joined).flatten()
    found = [bool(n) for n, order in enumerate(orders) if torch.equal(got, order.flatten())]
    if not found:
        raise KeptError(computed(v, "joins heads in an unknown order by"))
    return found


def _by_head(joined: Value, v: Value) -> Tensor | None:
    """The places of the entries of heads (b, h, s, d) or (b h, s, d), which a value joins."""
    places = indices_like(joined).long()
    if places.dim() == 3 and v.shape:
        count = v.shape[-1] // joined.shape[-1]
        places = places.unflatten(0, (-1, count)) if count and not len(places) % count else places
    return places if places.dim() == 4 else None


def _output(values: Values, weights: Value) -> Weights:
    return Weights(values.dataflow.outputs.index(weights), weights.meta.dtype)


def _returned(values: Values, core: Core, update: Node | None) -> Value | None:
    """The output of the module that is the weights; None if none is, or they are made otherwise."""
    # With gradients, a call whose cache holds keys of others is left to the module.
    own = core.q.requires_grad and update and update.results[0].shape[2] == core.q.shape[-2]
    if update is not None and not own:
        return None
    outputs = values.dataflow.outputs[1:]
    weights = () if core.weights is None or core.sinks else values.passed(core.weights)
    return next((v for v in outputs if v in weights and len(v.shape) == 4), None)


def _is_shared(v: Value, joined: Value, core: Core) -> bool:
    """Whether queries of one token may be the heads that share a head of keys."""
    masked = core.conditions or any(mask.shape[-2:-1] != (1,) for mask, _ in core.masks)
    if len(joined.shape) != 4 or joined.shape[2] == 1:
        return False
    alone = math.prod(v.shape[:-1]) == joined.shape[0]
    return alone and not core.causal and not masked and core.sinks is None


def _nodes(v: Value) -> tuple[Node, ...]:
    return () if v.node is None else (v.node,)


def _update_of(values: Values, core: Core, heads: int) -> Node | None:
    """The update of a cache that returns keys and values, whose heads may only be repeated."""
    updates = []
    for number, v in enumerate((core.k, core.v)):
        source = source_of(values, v)
        node = None if source is None else source.node
        if source is None or node is None or node.op != "cache.update":
            continue
        updates.append(node)
        places, got = indices_like(source).long(), origin_of(v, source)
        got = got.mT if core.transposed and number == 0 else got
        got = got.unflatten(0, (-1, heads)) if got.dim() == 3 else got
        repeated = places.repeat_interleave(got.shape[1] // places.shape[1], 1)
        if core.causal and got.shape[2] == core.q.shape[2]:
            # Of the keys, none is seen but those up to the number of queries.
            repeated = repeated[:, :, : got.shape[2]]
        if source is not node.results[number] or not torch.equal(got, repeated):
            raise KeptError(computed(v, "changes what its cache returns by"))
    if updates and (len(updates) != 2 or updates[0] is not updates[1]):
        raise KeptError("caches its keys and values differently")
    return updates[0] if updates else None


def _check_keys(core: Core, q: HeadsFound, k: HeadsFound, u: HeadsFound, *, is_other: bool) -> None:
    """Raises KeptError for values that are changed, or of other tokens than they may be.

    ``is_other`` says that keys need not be those of the queries' tokens.
    """
    if u.steps or u.scale != 1:
        raise KeptError(computed(core.v, "normalizes, turns or scales values by"))
    if k.tokens != u.tokens or q.tokens[0] != k.tokens[0]:
        raise KeptError(computed(core.k, "attends to values of other tokens than the keys', by"))
    if q.tokens != k.tokens and not is_other:
        raise KeptError(computed(core.k, "attends to other tokens than its own, by"))

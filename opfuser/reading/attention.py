"""Attention: what of it is computed, from the output of its heads back to their projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .arguments import is_number
from .dataflow import Node, Value
from .heads import HeadsFound, Turn, heads_of
from .kept import KeptError
from .operations import (
    Attention,
    HeadNorm,
    Heads,
    Mask,
    Norm,
    Operation,
    Reorder,
    Rotary,
)
from .products import product_of
from .replay import indices_like, origin_of, source_of
from .values import Values, computed

__all__ = ["AttentionFound", "attention_of", "gathered"]


@dataclass(frozen=True)
class _Core:
    """Scores, weights and their product with the values.

    Attributes:
        q, k, v: the heads; k as (b, h, d, s) if ``transposed``.
        scale: of the scores, besides factors of q and k.
    """

    q: Value
    k: Value
    v: Value
    transposed: bool
    scale: float
    causal: bool = False
    dropout_p: float = 0.0
    softcap: float | None = None
    masks: tuple[Value, ...] = ()
    sinks: str | None = None


@dataclass(frozen=True)
class AttentionFound:
    """Attention, and the projections that its packed input consists of.

    Attributes:
        attention: of the packed heads.
        steps: what orders, normalises and turns heads before, of all that ``sources`` hold.
        branches: what makes queries, keys and values if they are not packed; empty if they are.
        sources: the outputs of the projections, side by side; of the queries alone if there is a
            memory.
        memory: the outputs of the projections of another input, which are keys and values.
        memory_steps: what orders these.
        tokens: sizes of batch and sequence.
        once: the nodes that draw random numbers or update a cache.
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
    core = None if joined is None or places is None else _core_of(values, joined)
    if joined is None or places is None or core is None:
        return None
    shares, count = _is_shared(v, joined, core), places.shape[1]
    sequence_first, *either = _orders_of(v, joined, places, shares)
    once = _nodes(joined) if core.dropout_p else ()
    k_value, v_value, update = core.k, core.v, _update_of(values, core)
    if update is not None:
        k_value, v_value, once = *update.args, (*once, update)
    transposed = core.transposed and update is None
    order: Any = {"count": count, "sequence_first": sequence_first}
    q = heads_of(values, core.q, projected, shares=shares, **order)
    if either:
        rows = q.sources[0].shape[:-1]
        order["sequence_first"] = sequence_first = rows == q.tokens[::-1] != q.tokens
    k = heads_of(values, k_value, projected, transposed=transposed, **order)
    u = heads_of(values, v_value, projected, **order)
    if u.steps or u.scale != 1:
        raise KeptError(computed(core.v, "normalises, turns or scales values by"))
    is_cross = k.inputs == u.inputs and k.inputs.isdisjoint(q.inputs)
    if k.tokens != u.tokens or q.tokens[0] != k.tokens[0]:
        raise KeptError(computed(core.k, "attends to values of other tokens than the keys', by"))
    if q.tokens != k.tokens and not is_cross:
        raise KeptError(computed(core.k, "attends to other tokens than its own, by"))
    if update is not None and q.order:
        raise KeptError("turns the last entries of keys that a cache keeps")
    queries, keys = [q], [replace(f, columns=_distinct(f)) for f in (k, u)]
    heads = _sizes_of(*(f.columns for f in (*queries, *keys)))
    masks = _masks_of(values, core.masks, count)
    if core.q.requires_grad and any(mask.lowest is not None for mask in masks):
        # Kernels have no exact gradients of rows all of whose keys are hidden by numbers.
        raise KeptError("hides keys by large numbers of its own, with gradients enabled")
    attention = Attention(
        heads,
        core.scale * q.scale * k.scale,
        core.causal,
        core.dropout_p,
        core.softcap,
        masks,
        None if update is None else update.kwargs["layer"],
        core.sinks,
    )
    memory: _Packed = ((), ())
    branches: tuple[tuple[Operation, ...], ...] = ()
    if not is_cross and q.steps and heads.size != heads.value_size:
        # Nothing turns queries and keys beside values of another size.
        sources, total, orders = _joined([*queries, *keys])
        alone = [Heads(count, 0, heads.size, heads.size) for count in (heads.queries, heads.keys)]
        turns = [*(_steps(q, k, each) for each in alone), ()]
        branches = tuple((*gathered(o, total), *turn) for o, turn in zip(orders, turns))
        steps: tuple[Operation, ...] = ()
    elif not is_cross:
        sources, steps = _packed([*queries, *keys])
        steps = *steps, *_steps(q, k, heads)
    elif core.causal or update is not None or q.steps or k.steps:
        raise KeptError(computed(core.k, "normalises, turns, caches or hides keys of an input, by"))
    else:
        (sources, steps), memory = _packed(queries), _packed(keys)
    return AttentionFound(
        attention,
        steps,
        branches,
        sources,
        *memory,
        q.tokens[::-1] if sequence_first else q.tokens,
        once,
        sequence_first,
    )


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


def _is_shared(v: Value, joined: Value, core: _Core) -> bool:
    """Whether queries of one token may be the heads that share a head of keys."""
    masked = any(mask.shape[-2:-1] != (1,) for mask in core.masks)
    if len(joined.shape) != 4 or joined.shape[2] == 1:
        return False
    alone = math.prod(v.shape[:-1]) == joined.shape[0]
    return alone and not core.causal and not masked and core.sinks is None


def _nodes(v: Value) -> tuple[Node, ...]:
    return () if v.node is None else (v.node,)


def _update_of(values: Values, core: _Core) -> Node | None:
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
        repeated = places.repeat_interleave(got.shape[1] // places.shape[1], 1)
        if core.causal and got.shape[2] == core.q.shape[2]:
            # Of the keys, none is seen but those up to the number of queries.
            repeated = repeated[:, :, : got.shape[2]]
        if source is not node.results[number] or not torch.equal(got, repeated):
            raise KeptError(computed(v, "changes what its cache returns by"))
    if updates and (len(updates) != 2 or updates[0] is not updates[1]):
        raise KeptError("caches its keys and values differently")
    return updates[0] if updates else None


def _core_of(values: Values, v: Value) -> _Core | None:
    op, args = values.term(v)
    if op == "scaled_dot_product_attention":
        q, k, u, mask, p, causal, scale, _ = args
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        masks = () if mask is None else (mask,)
        return _Core(q, k, u, False, scale, bool(causal), float(p), None, masks)
    if op != "matmul" or not all(isinstance(a, Value) for a in args):
        return None
    weights, u = args
    p = 0.0
    op, args = values.term(weights)
    if op == "dropout":
        weights, p = args[0], float(args[1])
        op, args = values.term(weights)
    sinks = None
    if op == "__getitem__":  # of weights beside which a sink had its own
        sinks, (op, args) = args, values.term(args[0])
    if op != "softmax" or args[1] != -1:
        return None
    scores, name = _unshifted(values, args[0]), None
    if sinks is not None:
        scores, name = _without_sinks(values, scores, sinks[1])
    summed: list[Value] = []
    op, args = values.term(scores)
    while op == "add" and isinstance(args[1], Value):
        scores, mask = args if _is_input(values, args[1]) else args[::-1]
        summed.insert(0, mask)
        op, args = values.term(scores)
    if op == "baddbmm":
        mask, q, k = args
        core = _Core(q, k, k, True, 1.0)
        summed.insert(0, mask)
    else:
        core = _scores_of(values, scores)
    return replace(core, v=u, dropout_p=p, masks=tuple(summed), sinks=name)


def _unshifted(values: Values, scores: Value) -> Value:
    """Scores whose maximum is subtracted, which softmax does not see; or themselves."""
    op, args = values.term(scores)
    if op == "sub" and isinstance(args[1], Value):
        shift = args[1]
        op, of = values.term(shift)
        first = shift.node is not None and shift is shift.node.results[0]
        if op == "max" and of[1:] == (-1, True) and first:
            return args[0] if values.peel(of[0]) is values.peel(args[0]) else scores
    return scores


def _without_sinks(values: Values, scores: Value, index: Any) -> tuple[Value, str]:
    """Scores, and the parameter that stands beside them as one more key of each head.

    Args:
        values: of the dataflow.
        scores: both side by side.
        index: of the weights that are taken.

    Raises:
        KeptError: there is anything else beside scores.
    """
    op, args = values.term(scores)
    if op == "cat" and args[1:] == (-1,) and index == (..., slice(None, -1)) and len(args[0]) == 2:
        inner, beside = args[0]
        sinks = source_of(values, beside)
        if sinks is not None and sinks.origin == "parameter" and beside.shape[-1] == 1:
            of_heads = torch.arange(inner.shape[1]).view(1, -1, 1, 1).expand(beside.shape)
            if sinks.shape == inner.shape[1:2] and origin_of(beside, sinks).equal(of_heads):
                return inner, sinks.name
    raise KeptError(computed(scores, "takes a part of the weights of attention, which it makes by"))


def _scores_of(values: Values, scores: Value) -> _Core:
    """Products of queries and keys, scaled and capped."""
    product, cap, scale = product_of(values, scores, None), None, 1.0
    if len(product.values) == 1 and not product.inverse_roots:
        op, args = values.term(product.values[0])
        if op == "tanh":
            cap, product = product.factor, product_of(values, args[0], None)
            scale = cap
    if len(product.values) == 1 and not product.inverse_roots and (cap is None or cap > 0):
        op, args = values.term(product.values[0])
        if op == "matmul" and all(isinstance(a, Value) for a in args):
            scale *= product.factor
            return _Core(args[0], args[1], args[1], True, scale, softcap=cap)
    raise KeptError(f"{computed(values.peel(scores))}, in the scores of attention")


def _is_input(values: Values, v: Value) -> bool:
    source = source_of(values, v)
    return source is not None and source.origin == "input"


def _masks_of(values: Values, summed: tuple[Value, ...], heads: int) -> tuple[Mask, ...]:
    """The masks whose sum is added to scores, or the one bool mask that there is.

    Raises:
        KeptError: one is not an input, or they are joined in another way.
    """
    found = [mask for v in summed for mask in _parts_of(values, v, heads)]
    dtypes = [values.dataflow.inputs[mask.input].meta.dtype for mask in found]
    if len(found) > 1 and any(
        (dtype == torch.bool) != (mask.lowest is not None or mask.hides)
        for mask, dtype in zip(found, dtypes)
    ):
        raise KeptError("adds masks of attention that are not all numbers")
    return tuple(found)


def _parts_of(values: Values, v: Value, heads: int) -> list[Mask]:
    """The inputs that a mask is the sum of, or that choose between another one and a number."""
    op, args = values.term(v)
    if op == "add" and isinstance(args[1], Value):
        return [part for a in args for part in _parts_of(values, a, heads)]
    if op == "where" and len(args) == 3 and args[0].meta.dtype == torch.bool:
        lowest = torch.finfo(v.meta.dtype).min
        if isinstance(args[1], Value) and is_number(args[2]) and args[2] == lowest:
            return [
                *_parts_of(values, args[1], heads),
                replace(_mask_of(values, args[0], heads), lowest=lowest),
            ]
    return [_mask_of(values, v, heads)]


def _mask_of(values: Values, v: Value, heads: int) -> Mask:
    """The input that a mask is, broadcast to (b, h, s, s) or (b h, s, s)."""
    source = source_of(values, v)
    mask = source if source is None else _hiding(values, source)
    if source is None or mask is None or mask.origin != "input":
        raise KeptError(f"{computed(v if source is None else source)}, in the mask of attention")
    if mask.requires_grad:
        raise KeptError("has a bias of attention that needs a gradient")
    places, got = indices_like(source).long(), origin_of(v, source)
    got = got.unflatten(0, (-1, heads)) if got.dim() == 3 and not len(got) % heads else got
    for of_keys in (False, True)[: places.dim()]:
        want = places[:, None, None] if of_keys else places
        with suppress(RuntimeError):  # of shapes that do not broadcast
            if torch.equal(got, want.expand(got.shape)):
                number = values.dataflow.inputs.index(mask)
                return Mask(number, mask.shape, mask is not source, of_keys)
    if v is mask:
        raise KeptError("has a mask of attention for batch and heads in one dimension")
    raise KeptError(computed(v, "rearranges its mask by"))


def _hiding(values: Values, v: Value) -> Value:
    """The bool mask where a value is -inf, which is 0 elsewhere; or itself."""
    op, args = values.term(v)
    if op != "masked_fill" or args[2:] != (-math.inf,) or args[1].shape != v.shape:
        return v
    return args[1] if values.term(args[0]).op == "zeros_like" else v


def _sizes_of(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """Of the columns (heads, entries) of queries, keys and values."""
    heads = Heads(len(q), len(k), q.shape[1], v.shape[1])
    if len(k) != len(v) or heads.queries % heads.keys or k.shape[1] != heads.size:
        raise KeptError("has numbers or sizes of heads that do not fit")
    return heads


_Packed = tuple[tuple[Value, ...], tuple[Operation, ...]]
"""Projections, and what is done to the columns of all of them."""


def _joined(parts: list[HeadsFound]) -> tuple[tuple[Value, ...], int, list[Tensor]]:
    """(all projections, how many columns they have, those that each part consists of)."""
    sources = tuple(dict.fromkeys(source for part in parts for source in part.sources))
    widths = [source.shape[-1] for source in sources]
    places = dict(zip(sources, torch.arange(sum(widths)).split(widths)))
    orders = [torch.cat([places[s] for s in p.sources])[p.columns].flatten() for p in parts]
    return sources, sum(widths), orders


def _packed(parts: list[HeadsFound]) -> _Packed:
    """What makes heads of several parts, one behind another."""
    sources, total, orders = _joined(parts)
    return sources, gathered(torch.cat(orders), total)


def gathered(order: Tensor, total: int) -> tuple[Operation, ...]:
    """What takes columns of so many, in an order, in the largest blocks that there are."""
    if torch.equal(order, torch.arange(total)):
        return ()
    starts = [0, *((order.diff() != 1).nonzero().flatten() + 1).tolist()]
    size = math.gcd(total, len(order), *starts, *order[starts].tolist())
    return (Reorder(tuple((order[::size] // size).tolist()), size, total // size),)


def _distinct(found: HeadsFound) -> Tensor:
    """The columns of key or value heads, of which several queries' heads may read the same."""
    columns = found.columns
    share = int((columns == columns[:1]).all(-1).sum())
    if not torch.equal(columns, columns[::share].repeat_interleave(share, 0)):
        raise KeptError("repeats its heads in an unknown order")
    return columns[::share]


def _steps(q: HeadsFound, k: HeadsFound, heads: Heads) -> list[Operation]:
    """Norms and rotations of queries and keys, which have to be alike."""
    out: list[Operation] = []
    if len(q.steps) != len(k.steps):
        raise KeptError("normalises or turns queries and keys differently")
    for ours, theirs in zip(q.steps, k.steps):
        if isinstance(ours, Turn) and ours == theirs:
            out.append(Rotary(heads, *ours[:-1]))
        elif isinstance(ours, Norm) and isinstance(theirs, Norm):
            out.append(_head_norm(ours, theirs, heads))
        else:
            raise KeptError("normalises or turns queries and keys differently")
    return out


def _head_norm(q: Norm, k: Norm, heads: Heads) -> HeadNorm:
    if not heads.keys:
        raise KeptError("opfuser has no operation for norms of heads beside values of another size")
    alike = replace(q, weight=None) == replace(k, weight=None)
    if not alike or q.centred or (q.zero_centred_weight and None in (q.weight, k.weight)):
        raise KeptError("opfuser has no operation for such norms of queries and keys")
    return HeadNorm(heads, q.eps, q.weight, k.weight, q.zero_centred_weight)

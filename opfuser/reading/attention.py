"""Attention: what of it is computed, from the output of its heads back to their projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .arguments import is_number
from .dataflow import Node, Value
from .heads import HeadsFound, heads_of
from .kept import KeptError
from .latents import LatentsFound, latent_heads, latents_of, update_before
from .operations import Attention, Heads, Mask, Operation
from .packing import distinct, gathered, packed, shared_steps, side_by_side, sizes_of
from .products import product_of
from .replay import indices_like, origin_of, source_of
from .values import Values, computed

__all__ = ["AttentionFound", "attention_of"]


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
        memory: what keys and values are made of alone, side by side: with branches, of the same
            input, else the outputs of the projections of another one.
        memory_steps: what orders these.
        tokens: sizes of batch and sequence.
        once: the nodes that draw random numbers or update a cache.
        latents: how a cache returns the memory; None if it does not.
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


def attention_of(
    values: Values, v: Value, projected: Callable[[Value], Value | None]
) -> AttentionFound | None:
    """The attention whose heads a value joins; None if it joins none.

    Raises:
        KeptError: something about it is not explained.
    """
    joined = source_of(values, v)
    core = None if joined is None or len(joined.shape) != 4 else _core_of(values, joined)
    if joined is None or core is None:
        return None
    shares = _is_shared(v, joined, core)
    places = indices_like(joined).long()
    in_order = places.flatten() if shares else places.transpose(1, 2).flatten()
    if not torch.equal(origin_of(v, joined).flatten(), in_order):
        raise KeptError(computed(v, "joins heads in an unknown order by"))
    once = _nodes(joined) if core.dropout_p else ()
    q = heads_of(values, core.q, projected, shares=shares)
    update, kept = _update_of(values, core), None
    if update is None:
        kept = update_before(values, core.k, core.v)
    if kept is not None:
        k, u = latent_heads(values, core, kept, projected, q.tokens)
    elif update is not None:
        k, u = (heads_of(values, given, projected) for given in update.args)
    else:
        k = heads_of(values, core.k, projected, transposed=core.transposed)
        u = heads_of(values, core.v, projected)
    is_cross = kept is None and k.inputs == u.inputs and k.inputs.isdisjoint(q.inputs)
    _check_keys(core, q, k, u, is_other=is_cross or kept is not None)
    if update is not None:
        once = *once, update
        if q.order:
            raise KeptError("turns the last entries of keys that a cache keeps")
    k, u = (replace(f, columns=distinct(f)) for f in (k, u))
    heads = sizes_of(q.columns, k.columns, u.columns)
    masks = _masks_of(values, core.masks)
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
    if kept is not None:
        latents, branches = latents_of(heads, (q, k, u), kept)
        given, once = (q.sources, latents.sources), (*once, kept)
        return AttentionFound(attention, (), branches, *given, (), q.tokens, once, latents)
    if not is_cross:
        return _of_one_input(attention, (q, k, u), once)
    if core.causal or update is not None or q.steps or k.steps:
        raise KeptError(computed(core.k, "normalises, turns, caches or hides keys of an input, by"))
    (sources, steps), memory = packed([q]), packed([k, u])
    return AttentionFound(attention, steps, (), sources, *memory, q.tokens, once)


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


def _is_shared(v: Value, joined: Value, core: _Core) -> bool:
    """Whether queries of one token may be the heads that share a head of keys."""
    masked = any(mask.shape[-2:-1] != (1,) for mask in core.masks)
    alone = joined.shape[2] > 1 and math.prod(v.shape[:-1]) == joined.shape[0]
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


def _check_keys(
    core: _Core, q: HeadsFound, k: HeadsFound, u: HeadsFound, *, is_other: bool
) -> None:
    """Raises KeptError for values that are changed, or of other tokens than they may be.

    ``is_other`` says that keys need not be those of the queries' tokens.
    """
    if u.steps or u.scale != 1:
        raise KeptError(computed(core.v, "normalises, turns or scales values by"))
    if k.tokens != u.tokens or q.tokens[0] != k.tokens[0]:
        raise KeptError(computed(core.k, "attends to values of other tokens than the keys', by"))
    if q.tokens != k.tokens and not is_other:
        raise KeptError(computed(core.k, "attends to other tokens than its own, by"))


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


def _masks_of(values: Values, summed: tuple[Value, ...]) -> tuple[Mask, ...]:
    """The masks whose sum is added to scores, or the one bool mask that there is.

    Raises:
        KeptError: one is not an input, or they are joined in another way.
    """
    found = [mask for v in summed for mask in _parts_of(values, v)]
    dtypes = [values.dataflow.inputs[mask.input].meta.dtype for mask in found]
    if len(found) > 1 and any(
        (dtype == torch.bool) != (mask.lowest is not None) for mask, dtype in zip(found, dtypes)
    ):
        raise KeptError("adds masks of attention that are not all numbers")
    return tuple(found)


def _parts_of(values: Values, v: Value) -> list[Mask]:
    """The inputs that a mask is the sum of, or that choose between another one and a number."""
    op, args = values.term(v)
    if op == "add" and isinstance(args[1], Value):
        return [part for a in args for part in _parts_of(values, a)]
    if op == "where" and len(args) == 3 and args[0].meta.dtype == torch.bool:
        lowest = torch.finfo(v.meta.dtype).min
        if isinstance(args[1], Value) and is_number(args[2]) and args[2] == lowest:
            return [
                *_parts_of(values, args[1]),
                replace(_mask_of(values, args[0]), lowest=lowest),
            ]
    return [_mask_of(values, v)]


def _mask_of(values: Values, v: Value) -> Mask:
    """The input that a mask is."""
    mask = source_of(values, v)
    if mask is None or mask.origin != "input":
        raise KeptError(f"{computed(v if mask is None else mask)}, in the mask of attention")
    if mask.requires_grad:
        raise KeptError("has a bias of attention that needs a gradient")
    if v.shape != mask.shape or not torch.equal(origin_of(v, mask), indices_like(mask).long()):
        raise KeptError(computed(v, "rearranges its mask by"))
    return Mask(values.dataflow.inputs.index(mask), mask.shape)

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
from .heads import HeadsFound, heads_of
from .kept import KeptError
from .latents import LatentsFound, latent_heads, latents_of, update_before
from .made import made_of
from .operations import Attention, Heads, Made, Mask, Operation, Weights
from .packing import distinct, gathered, packed, shared_steps, side_by_side, sizes_of
from .products import product_of
from .replay import indices_like, origin_of, source_of
from .values import Values, computed

__all__ = ["AttentionFound", "attention_of"]

# Numbers below may hide all keys of a query, of which kernels have no exact gradients.
_LEAST = -128.0


@dataclass(frozen=True)
class _Core:
    """Scores, weights and their product with the values.

    Attributes:
        q, k, v: the heads; k as (b, h, d, s) if ``transposed``; or with one dimension in place of
            the first two.
        scale: of the scores, besides factors of q and k.
        masks: what is added to the scores, each with its factor.
        weights: the result of softmax; None if it is not seen.
    """

    q: Value
    k: Value
    v: Value
    transposed: bool
    scale: float
    causal: bool = False
    dropout_p: float = 0.0
    softcap: float | None = None
    masks: tuple[tuple[Value, float], ...] = ()
    sinks: str | None = None
    weights: Value | None = None


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
    core = None if joined is None or places is None else _core_of(values, joined)
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
    if update is not None and q.order:
        raise KeptError("turns the last entries of keys that a cache keeps")
    if kept is not None and sequence_first:
        raise KeptError("exchanges batch and sequence beside a cache")
    once = once if update is None else (*once, update)
    k, u = (replace(f, columns=distinct(f)) for f in (k, u))
    heads = sizes_of(q.columns, k.columns, u.columns)
    masks, bias, causal = _masks_of(values, core, count)
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
    )
    if kept is not None:
        latents, branches = latents_of(heads, (q, k, u), kept)
        both, once = (q.sources, latents.sources), (*once, kept)
        return AttentionFound(attention, (), branches, *both, (), q.tokens, once, latents)
    if not is_cross:
        found = _of_one_input(attention, (q, k, u), once)
    elif causal or update is not None or q.steps or k.steps:
        raise KeptError(computed(core.k, "normalises, turns, caches or hides keys of an input, by"))
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


def _returned(values: Values, core: _Core, update: Node | None) -> Value | None:
    """The output of the module that is the weights; None if none is, or they are made otherwise."""
    # With gradients, a call whose cache holds keys of others is left to the module.
    own = core.q.requires_grad and update and update.results[0].shape[2] == core.q.shape[-2]
    if update is not None and not own:
        return None
    outputs = values.dataflow.outputs[1:]
    weights = () if core.weights is None or core.sinks else values.passed(core.weights)
    return next((v for v in outputs if v in weights and len(v.shape) == 4), None)


def _is_shared(v: Value, joined: Value, core: _Core) -> bool:
    """Whether queries of one token may be the heads that share a head of keys."""
    masked = any(mask.shape[-2:-1] != (1,) for mask, _ in core.masks)
    if len(joined.shape) != 4 or joined.shape[2] == 1:
        return False
    alone = math.prod(v.shape[:-1]) == joined.shape[0]
    return alone and not core.causal and not masked and core.sinks is None


def _nodes(v: Value) -> tuple[Node, ...]:
    return () if v.node is None else (v.node,)


def _update_of(values: Values, core: _Core, heads: int) -> Node | None:
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
        masks = () if mask is None else ((mask, 1.0),)
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
    scores, summed, factor = _without_masks(values, scores)
    core = _scores_of(values, scores)
    return replace(
        core,
        v=u,
        scale=factor * core.scale,
        softcap=core.softcap and factor * core.softcap,
        dropout_p=p,
        masks=(*((m, factor * f) for m, f in core.masks), *summed),
        sinks=name,
        weights=weights,
    )


def _without_masks(values: Values, scores: Value) -> tuple[Value, list[tuple[Value, float]], float]:
    """(scores, the masks that are added to them, with their factors, the factor of the scores)."""
    summed: list[tuple[Value, float]] = []
    factor = 1.0
    while True:
        op, args = values.term(scores)
        if op == "add" and isinstance(args[1], Value):
            scores, mask = args if _is_added(values, args[1]) else args[::-1]
            summed.insert(0, (mask, factor))
        elif op in ("mul", "div") and is_number(args[1]) and _is_sum(values, args[0]):
            factor = factor * args[1] if op == "mul" else factor / args[1]
            scores = args[0]
        else:
            return scores, summed, factor


def _is_sum(values: Values, v: Any) -> bool:
    return isinstance(v, Value) and values.term(v).op == "add"


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
        if op == "baddbmm" and args[3] == 1 and cap is None:
            mask, q, k, _, alpha = args
            alone = (mask, product.factor)
            return _Core(q, k, k, True, float(alpha) * product.factor, masks=(alone,))
        if op == "matmul" and all(isinstance(a, Value) for a in args):
            scale *= product.factor
            return _Core(args[0], args[1], args[1], True, scale, softcap=cap)
    raise KeptError(f"{computed(values.peel(scores))}, in the scores of attention")


def _is_added(values: Values, v: Value) -> bool:
    source = source_of(values, v)
    given = source is not None and source.origin == "input"
    return given or made_of(values.dataflow, v) is not None


@dataclass
class _Added:
    """What is added to scores, and what chooses between that and a number.

    Attributes:
        masks: that are inputs.
        made: of sizes and parameters.
        count: how many tensors there are.
        causal: whether keys after the query are hidden by a number.
    """

    masks: list[Mask]
    made: list[Made]
    count: int = 0
    causal: bool = False


def _masks_of(
    values: Values, core: _Core, heads: int
) -> tuple[tuple[Mask, ...], int | Made | None, bool]:
    """The masks, of numbers that are added or the one that is bool, the bias, and causality.

    A bias is what needs a gradient, or is not given; and, where masks hide keys by numbers, all
    that is added besides: kernels have no exact gradients of rows all of whose keys are hidden so.

    Raises:
        KeptError: something else is added, or it is joined in another way.
    """
    added = _Added([], [])
    for v, factor in core.masks:
        # Of a larger number it would not be seen that it hides keys.
        if factor != 1 and not (0 < factor < 1 and v.meta.is_floating_point()):
            raise KeptError(computed(v, "scales a mask of attention, made by"))
        _add_parts(values, v, factor, heads, added)
    inputs = values.dataflow.inputs
    hiding = [m for m in added.masks if m.lowest is not None]
    numbers = [m for m in added.masks if m.lowest is None]
    of_numbers = [m.hides or inputs[m.input].meta.dtype != torch.bool for m in numbers]
    if any(m.factor != 1 for m in hiding):
        raise KeptError("scales a mask of attention that hides keys by numbers")
    if (added.count > 1 or core.transposed) and not all(of_numbers):
        raise KeptError("adds masks of attention that are not all numbers")
    trained = [m for m in numbers if inputs[m.input].requires_grad]
    differentiated = core.q.requires_grad or trained
    if not (added.causal or added.made or trained or (hiding and differentiated)):
        return tuple(added.masks), None, core.causal
    biases = numbers if hiding or added.causal else trained
    if len(biases) + len(added.made) > 1:
        raise KeptError("adds several biases to the scores of attention")
    if len(hiding) + added.causal > 1:
        raise KeptError("hides keys by large numbers several times")
    rearranged = any(m.hides or m.of_keys or m.folded for m in biases)
    if len(core.q.shape) == 3 or rearranged or any(m.factor != 1 for m in added.masks):
        raise KeptError("adds a bias to scores that are scaled, or of batch and heads in one")
    bias = added.made[0] if added.made else biases[0].input if biases else None
    masks = tuple(m for m in added.masks if m not in biases)
    return masks, bias, core.causal or added.causal


def _add_parts(values: Values, v: Value, factor: float, heads: int, added: _Added) -> None:
    """Notes the parts that a mask is the sum of, or that choose between another and a number."""

    def mask_of(part: Value) -> Mask:
        return replace(_mask_of(values, part, heads), factor=factor)

    op, args = values.term(v)
    if op == "add" and isinstance(args[1], Value):
        for part in args:
            _add_parts(values, part, factor, heads, added)
        return
    if op == "where" and len(args) == 3 and args[0].meta.dtype == torch.bool:
        # Under autocast that of the keys' dtype, in a mask of another.
        dtypes = {v.meta.dtype, *values.dtypes}
        lowest = args[2] if args[2] in [torch.finfo(dtype).min for dtype in dtypes] else None
        if isinstance(args[1], Value) and is_number(lowest):
            _add_parts(values, args[1], factor, heads, added)
            added.count += 1
            if _is_causal(values, args[0]):
                added.causal = True
            else:
                added.masks.append(replace(mask_of(args[0]), lowest=lowest))
            return
    added.count += 1
    made = made_of(values.dataflow, v) if v.meta.is_floating_point() else None
    if made is not None and made.least_constant < _LEAST:
        raise KeptError(f"{computed(v)} with large negative numbers, in the mask of attention")
    if made is not None and values.term(v).op == "zeros":
        return
    if made is None:
        added.masks.append(mask_of(v))
    else:
        added.made.append(made)


def _is_causal(values: Values, seen: Value) -> bool:
    """Whether a mask says that a position is not before another, for as many queries as keys."""
    op, args = values.term(seen)
    if op not in ("ge", "__ge__") or len(seen.shape) < 2 or seen.shape[-1] != seen.shape[-2]:
        return False
    positions = [source_of(values, v) if isinstance(v, Value) else None for v in args]
    for v in positions:
        node = None if v is None else v.node
        if v is None or node is None or node.op != "arange" or v.shape != seen.shape[-1:]:
            return False
        if len(node.args) != 1 or set(node.kwargs) - {"device"}:
            return False
    at, other = (origin_of(v, p) for v, p in zip(args, positions) if p is not None)
    expected = torch.ones(seen.shape[-2:], dtype=torch.bool, device="cpu").tril()
    return bool((at >= other).expand(seen.shape).eq(expected).all())


def _mask_of(values: Values, v: Value, heads: int) -> Mask:
    """The input that a mask is, broadcast to (b, h, s, s) or (b h, s, s)."""
    source = source_of(values, v)
    mask = source if source is None else _hiding(values, source)
    if source is None or mask is None or mask.origin != "input":
        raise KeptError(f"{computed(v if source is None else source)}, in the mask of attention")
    number, hides = values.dataflow.inputs.index(mask), mask is not source
    places, got = indices_like(source).long(), origin_of(v, source)
    if got.dim() == 3 and not len(got) % heads:
        got = got.unflatten(0, (-1, heads))
    if places.dim() == 3 and got.dim() == 4 and len(places) == got.shape[0] * got.shape[1]:
        count = got.shape[1]
        if torch.equal(got, places.unflatten(0, (-1, count))):
            return Mask(number, mask.shape, hides, folded=count)
    for of_keys in (False, True)[: places.dim()]:
        want = places[:, None, None] if of_keys else places
        with suppress(RuntimeError):  # of shapes that do not broadcast
            if torch.equal(got, want.expand(got.shape)):
                return Mask(number, mask.shape, hides, of_keys)
    raise KeptError(computed(v, "rearranges its mask by"))


def _hiding(values: Values, v: Value) -> Value:
    """The bool mask where a value is -inf, which is 0 elsewhere; or itself."""
    op, args = values.term(v)
    if op != "masked_fill" or args[2:] != (-math.inf,) or args[1].shape != v.shape:
        return v
    return args[1] if values.term(args[0]).op == "zeros_like" else v

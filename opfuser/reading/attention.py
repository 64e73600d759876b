"""Attention: what of it is computed, from the output of its heads back to their projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .arguments import is_number
from .dataflow import Node, Value
from .heads import HeadsFound, Turn, heads_of
from .kept import KeptError
from .made import made_of
from .operations import (
    Attention,
    HeadNorm,
    Heads,
    Made,
    Mask,
    Norm,
    Operation,
    Reorder,
    Rotary,
    Weights,
)
from .products import product_of
from .replay import indices_like, origin_of, source_of
from .values import Values, computed

__all__ = ["AttentionFound", "attention_of", "gathered"]

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
        folded: how many heads the first dimension holds besides the batch; 0 if it holds none.
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
    folded: int = 0


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
        returned: weights that the module returns.
    """

    attention: Attention
    steps: tuple[Operation, ...]
    branches: tuple[tuple[Operation, ...], ...]
    sources: tuple[Value, ...]
    memory: tuple[Value, ...]
    memory_steps: tuple[Operation, ...]
    tokens: tuple[int, int]
    once: tuple[Node, ...]
    returned: frozenset[Value] = frozenset()


def attention_of(
    values: Values, v: Value, projected: Callable[[Value], Value | None]
) -> AttentionFound | None:
    """The attention whose heads a value joins; None if it joins none.

    Raises:
        KeptError: something about it is not explained.
    """
    joined = source_of(values, v)
    core = None if joined is None or len(joined.shape) not in (3, 4) else _core_of(values, joined)
    if joined is None or core is None or (len(joined.shape) == 3 and not core.folded):
        return None
    shares = _is_shared(v, joined, core)
    places = _unfolded(indices_like(joined).long(), core.folded)
    in_order = places.flatten() if shares else places.transpose(1, 2).flatten()
    if not torch.equal(origin_of(v, joined).flatten(), in_order):
        raise KeptError(computed(v, "joins heads in an unknown order by"))
    once = _nodes(joined) if core.dropout_p else ()
    k_value, v_value, update = core.k, core.v, _update_of(values, core)
    if update is not None:
        k_value, v_value, once = *update.args, (*once, update)
    transposed = core.transposed and update is None
    folded = core.folded if update is None else 0
    q = heads_of(values, core.q, projected, shares=shares, folded=core.folded)
    k = heads_of(values, k_value, projected, transposed=transposed, folded=folded)
    u = heads_of(values, v_value, projected, folded=folded)
    is_cross = k.inputs == u.inputs and k.inputs.isdisjoint(q.inputs)
    _check(core, (q, k, u), is_cross, update)
    queries, keys = [q], [replace(f, columns=_distinct(f)) for f in (k, u)]
    heads = _sizes_of(*(f.columns for f in (*queries, *keys)))
    masks, bias, causal = _masks_of(values, core)
    forks = not is_cross and bool(q.steps) and heads.size != heads.value_size
    unweighted = is_cross or shares or forks or bias is not None
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
    memory: _Packed = ((), ())
    branches: tuple[tuple[Operation, ...], ...] = ()
    if forks:
        # Nothing turns queries and keys beside values of another size.
        sources, total, orders = _joined([*queries, *keys])
        alone = [Heads(count, 0, heads.size, heads.size) for count in (heads.queries, heads.keys)]
        turns = [*(_steps(q, k, each) for each in alone), ()]
        branches = tuple((*gathered(o, total), *turn) for o, turn in zip(orders, turns))
        steps: tuple[Operation, ...] = ()
    elif not is_cross:
        sources, steps = _packed([*queries, *keys])
        steps = *steps, *_steps(q, k, heads)
    elif causal or update is not None or q.steps or k.steps:
        raise KeptError(computed(core.k, "normalises, turns, caches or hides keys of an input, by"))
    else:
        (sources, steps), memory = _packed(queries), _packed(keys)
    of_output = frozenset() if returned is None else frozenset({returned})
    return AttentionFound(attention, steps, branches, sources, *memory, q.tokens, once, of_output)


def _check(core: _Core, found: tuple[HeadsFound, ...], is_cross: bool, update: Node | None) -> None:
    """Refuses queries, keys and values that do not fit.

    Raises:
        KeptError: says which, and why.
    """
    q, k, u = found
    if u.steps or u.scale != 1:
        raise KeptError(computed(core.v, "normalises, turns or scales values by"))
    if k.tokens != u.tokens or q.tokens[0] != k.tokens[0]:
        raise KeptError(computed(core.k, "attends to values of other tokens than the keys', by"))
    if q.tokens != k.tokens and not is_cross:
        raise KeptError(computed(core.k, "attends to other tokens than its own, by"))
    if update is not None and q.order:
        raise KeptError("turns the last entries of keys that a cache keeps")


def _unfolded(places: Tensor, folded: int) -> Tensor:
    return places.unflatten(0, (-1, folded)) if folded else places


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
    alone = (
        len(joined.shape) == 4
        and joined.shape[2] > 1
        and math.prod(v.shape[:-1]) == joined.shape[0]
    )
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
        got = _unfolded(got.mT if core.transposed and number == 0 else got, core.folded)
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
    core, whole = _scores_of(values, scores), values.peel(weights)
    return replace(
        core,
        v=u,
        scale=factor * core.scale,
        softcap=core.softcap and factor * core.softcap,
        dropout_p=p,
        masks=(*((m, factor * f) for m, f in core.masks), *summed),
        sinks=name,
        weights=weights,
        folded=whole.shape[1] if len(u.shape) == 3 < len(whole.shape) else 0,
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


def _masks_of(values: Values, core: _Core) -> tuple[tuple[Mask, ...], int | Made | None, bool]:
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
        _add_parts(values, v, factor, core.folded, added)
    inputs = values.dataflow.inputs
    hiding = [m for m in added.masks if m.lowest is not None]
    numbers = [m for m in added.masks if m.lowest is None]
    of_numbers = [inputs[m.input].meta.dtype != torch.bool for m in numbers]
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
    if core.folded or any(m.factor != 1 for m in added.masks):
        raise KeptError("adds a bias to scores that are scaled, or of batch and heads in one")
    bias = added.made[0] if added.made else biases[0].input if biases else None
    masks = tuple(m for m in added.masks if m not in biases)
    return masks, bias, core.causal or added.causal


def _add_parts(values: Values, v: Value, factor: float, folded: int, added: _Added) -> None:
    """Notes the parts that a mask is the sum of, or that choose between another and a number."""

    def mask_of(part: Value) -> Mask:
        mask = _mask_of(values, part)
        return replace(mask, factor=factor, folded=folded if len(mask.shape) == 3 else 0)

    op, args = values.term(v)
    if op == "add" and isinstance(args[1], Value):
        for part in args:
            _add_parts(values, part, factor, folded, added)
        return
    if op == "where" and len(args) == 3 and args[0].meta.dtype == torch.bool:
        # Under autocast that of the keys' dtype, in a mask of another.
        dtypes = {v.meta.dtype, *values.dtypes}
        lowest = args[2] if args[2] in [torch.finfo(dtype).min for dtype in dtypes] else None
        if isinstance(args[1], Value) and is_number(lowest):
            _add_parts(values, args[1], factor, folded, added)
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


def _mask_of(values: Values, v: Value) -> Mask:
    """The input that a mask is."""
    mask = source_of(values, v)
    if mask is None or mask.origin != "input":
        raise KeptError(f"{computed(v if mask is None else mask)}, in the mask of attention")
    if v.shape != mask.shape or not torch.equal(origin_of(v, mask), indices_like(mask).long()):
        raise KeptError(computed(v, "rearranges its mask by"))
    return Mask(values.dataflow.inputs.index(mask), mask.shape)


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
    alike = replace(q, weight=None, bias=None) == replace(k, weight=None, bias=None)
    unweighted = q.zero_centred_weight and (q.centred or None in (q.weight, k.weight))
    if not alike or unweighted:
        raise KeptError("opfuser has no operation for such norms of queries and keys")
    weights = q.weight, k.weight, q.zero_centred_weight
    return HeadNorm(heads, q.eps, *weights, q.centred, q.bias, k.bias)

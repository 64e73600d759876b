"""Scores of attention, and their weights: what they are products of, and what is added to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from .arguments import is_number
from .dataflow import Value
from .kept import KeptError
from .made import made_of
from .products import product_of
from .replay import origin_of, source_of
from .values import Values, computed


@dataclass(frozen=True)
class Core:
    """Scores, weights and their product with the values.

    Attributes:
        q, k, v: the heads; k as (b, h, d, s) if ``transposed``; or with one dimension in place of
            the first two.
        scale: of the scores, besides factors of q and k.
        masks: what is added to the scores, each with its factor.
        conditions: what hides keys, and whether it is True where they are seen.
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
    conditions: tuple[tuple[Value, bool], ...] = ()
    sinks: str | None = None
    weights: Value | None = None


def core_of(values: Values, v: Value) -> Core | None:
    """The scores, weights and values that heads are computed of; None of what is no attention.

    Raises:
        KeptError: the scores are made in another way.
    """
    op, args = values.term(v)
    if op == "scaled_dot_product_attention":
        q, k, u, mask, p, causal, scale, _ = args
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        masks = () if mask is None else ((mask, 1.0),)
        return Core(q, k, u, False, scale, bool(causal), float(p), None, masks)
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
    conditions: list[tuple[Value, bool]] = []
    scores, summed, factor = _without_masks(values, scores, conditions)
    core = _scores_of(values, scores)
    return replace(
        core,
        v=u,
        scale=factor * core.scale,
        softcap=core.softcap and factor * core.softcap,
        dropout_p=p,
        masks=(*((m, factor * f) for m, f in core.masks), *summed),
        conditions=tuple(conditions),
        sinks=name,
        weights=weights,
    )


def _without_masks(
    values: Values, scores: Value, conditions: list[tuple[Value, bool]]
) -> tuple[Value, list[tuple[Value, float]], float]:
    """(scores, the masks that are added to them, with their factors, the factor of the scores).

    Notes the conditions on which scores are -inf.
    """
    summed: list[tuple[Value, float]] = []
    factor = 1.0
    while True:
        op, args = values.term(scores)
        if op == "add" and isinstance(args[1], Value):
            scores, mask = args if _is_added(values, args[1]) else args[::-1]
            summed.insert(0, (mask, factor))
        elif (condition := _condition(op, args, scores)) is not None:
            scores, hides, seen = condition
            conditions.append((hides, seen))
        elif op in ("mul", "div") and is_number(args[1]) and _is_sum(values, args[0]):
            factor = factor * args[1] if op == "mul" else factor / args[1]
            scores = args[0]
        else:
            return scores, summed, factor


def _condition(op: str, args: tuple[Any, ...], scores: Value) -> tuple[Value, Value, bool] | None:
    """(what is -inf on a condition, the condition, whether it is True where it is not)."""
    if len(args) != 3 or not is_number(args[2]) or args[2] != -math.inf:
        return None
    if op == "masked_fill":
        inner, condition = args[:2]
    elif op == "where":
        condition, inner = args[:2]
    else:
        return None
    given = isinstance(inner, Value) and isinstance(condition, Value)
    if not given or inner.shape != scores.shape or condition.meta.dtype != torch.bool:
        return None
    return inner, condition, op == "where"


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


def _scores_of(values: Values, scores: Value) -> Core:
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
            return Core(q, k, k, True, float(alpha) * product.factor, masks=(alone,))
        if op == "matmul" and all(isinstance(a, Value) for a in args):
            scale *= product.factor
            return Core(args[0], args[1], args[1], True, scale, softcap=cap)
    raise KeptError(f"{computed(values.peel(scores))}, in the scores of attention")


def _is_added(values: Values, v: Value) -> bool:
    source = source_of(values, v)
    given = source is not None and source.origin == "input"
    return given or made_of(values.dataflow, v) is not None

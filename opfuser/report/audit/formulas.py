"""Formulas: what a value of a dataflow is the result of, as :mod:`opfuser.reading` reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from ...counterparts import GATED
from ...reading.activations import activations_in
from ...reading.arguments import Term
from ...reading.dataflow import Value
from ...reading.kept import KeptError
from ...reading.norms import norm_of
from ...reading.operations import Linear, Norm
from ...reading.products import product_of
from ...reading.projections import linear_of, vector_of
from ...reading.replay import source_of
from ...reading.values import Values


class Formula(NamedTuple):
    """An operation whose result a value is.

    Attributes:
        kind: what is computed: "rms_norm", "linear", "swiglu" and so on.
        inputs: what it is computed from, the main one first; no parameters.
        operands: paths of parameters, and numbers.
        others: that it reads besides, such as masks.
    """

    kind: str
    inputs: tuple[Value, ...]
    operands: Mapping[str, Any] = MappingProxyType({})
    others: tuple[Value, ...] = ()


def formulas_of(values: Values, v: Value) -> Iterator[Formula]:
    """What a value may be the result of, the larger formula first."""
    for rule in _RULES:
        with suppress(KeptError):  # numbers are rounded on the way, or the like
            yield from rule(values, v)


def _norm(values: Values, v: Value) -> Iterator[Formula]:
    found = norm_of(values, v, None)
    if found is not None and found.factor == 1:
        yield Formula(_kind(found.norm), (found.x,), {
            "weight": found.norm.weight, "bias": found.norm.bias, "eps": found.norm.eps,
            "zero_centered_gamma": found.norm.zero_centered_weight,
        })  # fmt: skip


def _kind(norm: Norm) -> str:
    return "layer_norm" if norm.centered else "rms_norm"


def _linear(values: Values, v: Value) -> Iterator[Formula]:
    found = linear_of(values, v)
    if found is not None and isinstance(found.linear, Linear):
        operands = {"weight": found.linear.weight, "bias": found.linear.bias}
        yield Formula("linear", (found.x,), operands)


def _activation(values: Values, v: Value) -> Iterator[Formula]:
    found = activations_in(values, product_of(values, v, None))
    for act in sorted(found, key=lambda one: len(one.rest.values)):
        plain = "" if act.activation.constants else act.activation.name
        gated = "geglu_exact" if plain == "gelu" else GATED.get(plain)
        shapes = [v.shape for v in act.rest.values if v.origin != "parameter"]
        if not math.isclose(act.rest.factor, 1.0):
            continue
        if plain and not act.rest.values:
            yield Formula(plain, (act.x,))
        elif gated and shapes == [act.x.shape] and len(act.rest.values) == 1:
            yield Formula(gated, (act.x, *act.rest.values))


def _attention(values: Values, v: Value) -> Iterator[Formula]:
    op, args = values.term(v)
    if op not in _PRODUCTS or len(_operands(args)) != 2:
        return
    weights, u = _operands(args)
    op, of = values.term(weights)
    if op == "dropout":
        op, of = values.term(of[0])
    if op == "softmax" and of[1] == -1:
        for q, k, *others in _scores(values, of[0], 6):
            yield Formula("attention", (q, k, u), {}, tuple(others))


_PRODUCTS = ("matmul", "einsum")
# What may be done to scores before softmax.
_OF_SCORES = frozenset("add sub mul div masked_fill where clamp".split())


def _scores(values: Values, v: Value, depth: int) -> Iterator[tuple[Value, ...]]:
    """Queries and keys, and what else is read to make scores of them."""
    op, args = values.term(v)
    given = _operands(args)
    if op in _PRODUCTS and len(given) == 2:
        yield tuple(given)
    elif op == "baddbmm":
        mask, q, k = given
        yield q, k, mask
    for at in given if op in _OF_SCORES and depth else ():
        for found in _scores(values, at, depth - 1):
            yield (*found, *(other for other in given if other is not at))


def _operands(args: tuple[Any, ...]) -> list[Value]:
    return [a for a in args if isinstance(a, Value)]


def _rotary(values: Values, v: Value) -> Iterator[Formula]:
    op, args = values.term(v)
    if op == "view_as_real":
        op, args = values.term(args[0])
        for x, turns in (args, args[::-1]) if op == "mul" else ():
            pairs = values.term(x) if isinstance(x, Value) else Term("", ())
            source = source_of(values, pairs.args[0]) if pairs.op == "view_as_complex" else None
            if source is not None:
                yield Formula("rotary_embedding", (source, turns))
        return
    terms = [values.term(a) for a in _operands(args)] if op == "add" else []
    if [t.op for t in terms] != ["mul", "mul"]:
        return
    for straight, crossed in (terms, terms[::-1]):
        for x, cos in (straight.args, straight.args[::-1]):
            for turned, sin in (crossed.args, crossed.args[::-1]):
                if isinstance(cos, Value) and isinstance(sin, Value) and _turns(values, turned, x):
                    yield Formula("rotary_embedding", (values.peel(x), cos, sin))


def _turns(values: Values, turned: Any, x: Any) -> bool:
    """Whether halves of the last dimension of x are exchanged, and one is negated."""
    if not isinstance(turned, Value) or not isinstance(x, Value):
        return False
    op, args = values.term(turned)
    if op != "cat" or len(args[0]) != 2 or args[1] not in (-1, len(turned.shape) - 1):
        return False
    op, of = values.term(args[0][0])
    halves = (*of, args[0][1]) if op == "neg" else ()
    half = (*x.shape[:-1], x.shape[-1] // 2)
    return len(halves) == 2 and all(
        part.shape == half and part.node is not None
        and part.node.op in ("chunk", "split", "__getitem__", "narrow")
        and values.peel(part.node.args[0]) is values.peel(x)
        for part in map(values.peel, halves)
    )  # fmt: skip


def _modulated(values: Values, v: Value) -> Iterator[Formula]:
    """(1 + scale) norm(x) + shift, with or without the 1 and the shift."""
    op, args = values.term(v)
    sums = (args, args[::-1]) if op == "add" and len(_operands(args)) == 2 else ()
    for scaled, shift in (*sums, *([(v, None)] if op == "mul" else ())):
        op, factors = values.term(scaled)
        for inner, factor in (factors, factors[::-1]) if op == "mul" else ():
            if not all(isinstance(f, Value) and f.origin == "node" for f in (inner, factor)):
                continue
            op, args = values.term(factor)
            plus_one = op == "add" and args[1] == 1
            found = norm_of(values, inner, None) if plus_one or shift is not None else None
            if found is not None and found.factor == 1 and found.norm.weight is None:
                scale = args[0] if plus_one else factor
                inputs = (found.x, scale, *(() if shift is None else (shift,)))
                yield Formula(f"adaptive_{_kind(found.norm)}", inputs)


def _one_function(values: Values, v: Value) -> Iterator[Formula]:
    op, args = values.term(v)
    if op == "dropout":
        yield Formula("dropout", args[:1], {"p": args[1]})
    elif op == "embedding" and args[1].origin == "parameter":
        yield Formula("embedding", args[:1], {"weight": args[1].name})
    elif op == "add" and len(_operands(args)) == 2:
        for x, bias in (args, args[::-1]):
            vector = vector_of(values, bias)
            if vector is not None:
                yield Formula("bias", (x,), {"weight": vector.name})
        if args[0].shape == args[1].shape and all(a.origin != "parameter" for a in args):
            yield Formula("add", args)


_Rule = Callable[[Values, Value], Iterator[Formula]]
_RULES: tuple[_Rule, ...] = (
    _attention, _rotary, _norm, _modulated, _linear, _activation, _one_function,
)  # fmt: skip

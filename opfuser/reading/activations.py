"""How activations look as operations of torch.

The arguments of functions are compared as polynomials, so that the way in which a power or a sum is
written does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import is_number
from .dataflow import Value
from .operations import Activation
from .products import Product
from .replay import columns_of
from .values import Values

__all__ = ["ActivationFound", "ClampedPair", "activations_in", "clamped_pair", "halves_of"]

# Constants are written with eight digits in places.
_CLOSE = 1e-7
_SIMPLE = {
    "silu": "silu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "softplus": "softplus",
}
_BY_SIGMOID = {1.0: "silu", 1.702: "quick gelu"}


class ActivationFound(NamedTuple):
    """An activation, its argument, and the other factors of the product that it stands in."""

    activation: Activation
    x: Value
    rest: Product


def activations_in(values: Values, product: Product) -> Iterator[ActivationFound]:
    """Those among the factors of a product."""
    if product.inverse_roots:
        return
    for factor in dict.fromkeys(product.values):
        rest = product.without(factor)
        assert rest is not None
        op, args = values.term(factor)
        if op in _SIMPLE:
            constants = tuple(map(float, args[1:]))
            yield ActivationFound(Activation(_SIMPLE[op], constants), values.peel(args[0]), rest)
        elif op == "gelu":
            name = {"none": "gelu", "tanh": "gelu by tanh"}.get(args[1])
            if name:
                yield ActivationFound(Activation(name), values.peel(args[0]), rest)
        elif op == "square":
            op, args = values.term(args[0])
            if op == "relu":
                yield ActivationFound(Activation("squared relu"), values.peel(args[0]), rest)
        yield from _with_argument(values, factor, rest)


def _with_argument(values: Values, factor: Value, rest: Product) -> Iterator[ActivationFound]:
    """The activations x σ(k x) and 0.5 x (1 + f(x)), whose x is another factor."""
    op, args = values.term(factor)
    if op == "sigmoid":
        (x, coefficients), name = polynomial_of(values, args[0]), None
        if x is not None and set(coefficients) == {1}:
            name = _BY_SIGMOID.get(coefficients[1])
        after = None if x is None else rest.without(x)
        if name and x is not None and after is not None:
            yield ActivationFound(Activation(name), x, after)
    elif op == "add" and is_number(args[1]) and args[1] == 1:
        op, args = values.term(args[0])
        if op not in ("tanh", "erf"):
            return
        x, coefficients = polynomial_of(values, args[0])
        expected = {1: math.sqrt(0.5)}
        if op == "tanh":
            expected = {1: math.sqrt(2 / math.pi), 3: math.sqrt(2 / math.pi) * 0.044715}
        after = None if x is None else rest.without(x)
        if x is None or after is None or set(coefficients) != set(expected):
            return
        if all(math.isclose(coefficients[n], c, rel_tol=_CLOSE) for n, c in expected.items()):
            name = "gelu by tanh" if op == "tanh" else "gelu"
            doubled = Product(2 * after.factor, after.values)
            yield ActivationFound(Activation(name), x, doubled)


class ClampedPair(NamedTuple):
    """The arguments of a gated product that clamps them, and how."""

    gate: Value
    up: Value
    limit: float
    offset: float


def clamped_pair(values: Values, gate: Value, up: Value) -> ClampedPair | None:
    """What a gate, and what it multiplies, are made of by clamping the one from above.

    The other is clamped on both sides, and perhaps has something added to it.
    """
    op, args = values.term(gate)
    if op != "clamp" or args[1] is not None or not is_number(args[2]):
        return None
    limit, offset = float(args[2]), 0.0
    gate = args[0]
    op, args = values.term(up)
    if op == "add" and is_number(args[1]):
        offset = float(args[1])
        op, args = values.term(args[0])
    if op != "clamp" or args[1:] != (-limit, limit) or limit <= 0:
        return None
    return ClampedPair(gate, args[0], limit, offset)


def halves_of(values: Values, gate: Value, up: Value) -> tuple[Value, Tensor] | None:
    """(a value, its columns that gate and those that they multiply); None if of several."""
    found, other = columns_of(values, gate), columns_of(values, up)
    if found is None or other is None or found[0] is not other[0]:
        return None
    return found[0], torch.cat([found[1], other[1]])


def polynomial_of(values: Values, v: Value) -> tuple[Value | None, dict[int, float]]:
    """(x, coefficients by power) of a value that is a polynomial of x; x is None for several."""
    terms = _monomials(values, v, 8)
    variables = {x for monomial in terms for x in monomial}
    if len(variables) != 1:
        return None, {}
    return variables.pop(), {len(monomial): c for monomial, c in terms.items()}


_Polynomial = dict[tuple[Value, ...], float]
"""Coefficients by monomials, whose values are in order of their identity."""


def _monomials(values: Values, v: Value, depth: int) -> _Polynomial:
    """The polynomial that a value is, in values that are none themselves."""
    v = values.peel(v)
    op, args = values.term(v)
    itself: _Polynomial = {(v,): 1.0}
    if not depth or op not in ("add", "sub", "mul", "div", "neg", "square", "pow"):
        return itself
    first = _monomials(values, args[0], depth - 1)
    if op in ("square", "pow"):
        power = 2 if op == "square" else args[1]
        if power not in (2, 3):
            return itself
        return _times(first, first if power == 2 else _times(first, first))
    second: _Polynomial = {(): -1.0}
    if args[1:]:
        if not isinstance(args[1], Value) and not is_number(args[1]):
            return itself
        other = args[1]
        second = (
            _monomials(values, other, depth - 1) if isinstance(other, Value) else {(): float(other)}
        )
    if op in ("add", "sub"):
        return _plus(first, second if op == "add" else _times(second, {(): -1.0}))
    if op == "div":
        if set(second) != {()} or not second[()]:
            return itself
        second = {(): 1.0 / second[()]}
    return _times(first, second)


def _times(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    out: _Polynomial = {}
    for m, c in a.items():
        for n, d in b.items():
            out = _plus(out, {tuple(sorted((*m, *n), key=id)): c * d})
    return out


def _plus(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    return {m: a.get(m, 0.0) + b.get(m, 0.0) for m in {**a, **b}}

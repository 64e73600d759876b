"""How activations look as operations of torch.

The arguments of functions are compared as polynomials, so that the way in which a power or a sum is
written does not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..basic.activation import GELU
from ..counterparts import ACTIVATIONS
from .arguments import is_number
from .dataflow import Value
from .operations import Activation, Gated
from .products import Product
from .replay import columns_of
from .values import Values

_GELUS = {row.arguments[0]: n for n, row in ACTIVATIONS.items() if row.operation is GELU}
# Products of x and a function of a polynomial of x, by the function: the activation, coefficients
# by power, and to what they are exact: those of GELU are written with eight digits in places.
_ROOT = math.sqrt(2 / math.pi)
FORMULAS: dict[str, tuple[tuple[str, dict[int, float], float], ...]] = {
    "sigmoid": (("silu", {1: 1.0}, 0.0), ("quick_gelu", {1: 1.702}, 0.0)),
    "1 + erf": (("gelu", {1: math.sqrt(0.5)}, 1e-7),),
    "1 + tanh": (("gelu_tanh", {1: _ROOT, 3: _ROOT * 0.044715}, 1e-7),),
}


class ActivationFound(NamedTuple):
    """An activation, its argument, and the other factors of the product that it stands in."""

    activation: Activation
    x: Value
    rest: Product


def activations_in(values: Values, product: Product) -> Iterator[ActivationFound]:
    """Activations among the factors of a product."""
    if product.inverse_roots:
        return
    for factor in dict.fromkeys(product.values):
        rest = product.without(factor)
        assert rest is not None
        op, args = values.term(factor)
        row = ACTIVATIONS.get(op)
        if op == "gelu":
            name = _GELUS.get(args[1])
            if name:
                yield ActivationFound(Activation(name), values.peel(args[0]), rest)
        elif row is not None and row.torch is not None:
            constants = tuple(map(float, args[1:]))
            yield ActivationFound(Activation(op, constants), values.peel(args[0]), rest)
        elif op == "square":
            op, args = values.term(args[0])
            if op == "relu":
                yield ActivationFound(Activation("squared_relu"), values.peel(args[0]), rest)
        yield from _with_argument(values, factor, rest)


def _with_argument(values: Values, factor: Value, rest: Product) -> Iterator[ActivationFound]:
    """The activations x σ(k x) and 0.5 x (1 + f(x)), whose x is another factor."""
    op, args = values.term(factor)
    if op == "add" and is_number(args[1]) and args[1] == 1:
        op, args = values.term(args[0])
        op = {"tanh": "1 + tanh", "erf": "1 + erf"}.get(op, "")
    for x, formula in itertools.product(dict.fromkeys(rest.values), FORMULAS.get(op, ())):
        name, expected, digits = formula
        found, after = polynomial_of(values, args[0], x), rest.without(x)
        if found is None or after is None or set(found) != set(expected):
            continue
        if all(math.isclose(found[n], c, rel_tol=digits) for n, c in expected.items()):
            scaled = after.times(Product(1.0 if op == "sigmoid" else 2.0))
            yield ActivationFound(Activation(name), x, scaled)


def gate_of(values: Values, found: ActivationFound) -> tuple[Gated, Value, Value]:
    """The gated activation that a product with one other factor is, its gate, and that factor.

    Gates may be clamped from above, where the other is clamped on both sides, and perhaps has
    something added to it: then both are what is clamped.
    """
    gate, up = found.x, found.rest.values[0]
    whole = Gated(found.activation), gate, up
    op, args = values.term(gate)
    if op != "clamp" or args[1] is not None or not is_number(args[2]):
        return whole
    limit, offset, gate = float(args[2]), 0.0, args[0]
    op, args = values.term(up)
    if op == "add" and is_number(args[1]):
        offset = float(args[1])
        op, args = values.term(args[0])
    if op != "clamp" or args[1:] != (-limit, limit) or limit <= 0:
        return whole
    return Gated(found.activation, limit, offset), gate, args[0]


def halves_of(values: Values, gate: Value, up: Value) -> tuple[Value, Tensor] | None:
    """(a value, its columns that gate and those that they multiply); None if of several."""
    found, other = columns_of(values, gate), columns_of(values, up)
    if found is None or other is None or found[0] is not other[0]:
        return None
    return found[0], torch.cat([found[1], other[1]])


_Polynomial = dict[int, float]
"""Coefficients by power."""


def polynomial_of(values: Values, v: object, x: Value, depth: int = 8) -> _Polynomial | None:
    """The polynomial of ``x`` that a value is; None if it is none, or of more operations."""
    if is_number(v):
        return {0: float(v)}  # type: ignore[arg-type]
    if not isinstance(v, Value):
        return None
    v = values.peel(v)
    if v is x:
        return {1: 1.0}
    op, args = values.term(v)
    if not depth or op not in ("add", "sub", "mul", "div", "neg", "square", "pow"):
        return None
    first = polynomial_of(values, args[0], x, depth - 1)
    if first is None:
        return None
    if op in ("square", "pow"):
        power = 2 if op == "square" else args[1]
        return {2: _times(first, first), 3: _times(first, _times(first, first))}.get(power)
    second = {0: -1.0} if op == "neg" else polynomial_of(values, args[1], x, depth - 1)
    if second is None:
        return None
    if op in ("add", "sub"):
        second = second if op == "add" else _times(second, {0: -1.0})
        return {n: first.get(n, 0.0) + second.get(n, 0.0) for n in {**first, **second}}
    if op == "div":
        return _times(first, {0: 1.0 / second[0]}) if set(second) == {0} and second[0] else None
    return _times(first, second)


def _times(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    out: _Polynomial = {}
    for (m, c), (n, d) in itertools.product(a.items(), b.items()):
        out[m + n] = out.get(m + n, 0.0) + c * d
    return out

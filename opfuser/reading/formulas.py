"""How norms and activations look as operations of torch.

Products are compared as sets of factors and arguments of functions as polynomials, so that neither
the order of factors nor the way in which a power is written matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .arguments import is_number
from .dataflow import Value
from .operations import Activation, Norm
from .values import Values

__all__ = [
    "ActivationFound",
    "ClampedPair",
    "NormFound",
    "Product",
    "activations_in",
    "clamped_pair",
    "norm_of",
    "product_of",
]

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


@dataclass(frozen=True)
class Product:
    """``factor`` times values, times ``1 / sqrt(v)`` of each v of ``inverse_roots``."""

    factor: float
    values: tuple[Value, ...] = ()
    inverse_roots: tuple[Value, ...] = ()

    def times(self, other: Product) -> Product:
        """The product of both."""
        return Product(
            self.factor * other.factor,
            self.values + other.values,
            self.inverse_roots + other.inverse_roots,
        )

    def without(self, *values: Value) -> Product | None:
        """The product of the others, each value taken out once; None if one is not there."""
        rest = list(self.values)
        for value in values:
            if value not in rest:
                return None
            rest.remove(value)
        return Product(self.factor, tuple(rest), self.inverse_roots)


def product_of(values: Values, v: Value, base: Value | None) -> Product:
    """The factors of a value; ``base`` is none that is taken apart."""
    v = values.peel(v)
    if v is base:
        return Product(1.0, (v,))
    op, args = values.term(v)
    if op == "neg":
        return Product(-1.0).times(product_of(values, args[0], base))
    if op == "rsqrt":
        return Product(1.0, (), (values.peel(args[0]),))
    if op == "reciprocal" and (root := _root(values, args[0])):
        return Product(1.0, (), (root,))
    if op in ("mul", "div") and isinstance(args[0], Value):
        first, second = args
        if is_number(second) and (op == "mul" or second):
            factor = float(second) if op == "mul" else 1.0 / second
            return Product(factor).times(product_of(values, first, base))
        if op == "mul" and isinstance(second, Value) and _fits(v, first, second):
            return product_of(values, first, base).times(product_of(values, second, base))
        if op == "div" and (root := _root(values, second)):
            return product_of(values, first, base).times(Product(1.0, (), (root,)))
    return Product(1.0, (v,))


def _root(values: Values, v: object) -> Value | None:
    """What a value is the square root of."""
    if not isinstance(v, Value):
        return None
    op, args = values.term(v)
    return values.peel(args[0]) if op == "sqrt" else None


def _fits(v: Value, *factors: Value) -> bool:
    """Whether each factor has the shape of the product, one number per row, or one per column."""
    rows, columns = (*v.shape[:-1], 1), v.shape[-1:]
    return all(f.shape in (v.shape, rows, columns) for f in factors)


class NormFound(NamedTuple):
    """A norm, what it normalises, and a factor behind it."""

    norm: Norm
    x: Value
    factor: float


def norm_of(values: Values, v: Value, base: Value | None) -> NormFound | None:
    """The norm over the last dimension that a value is the result of."""
    v = values.peel(v)
    op, args = values.term(v)
    if op in ("layer_norm", "rms_norm"):
        return _norm_by_function(values, v)
    if op == "add" and isinstance(args[1], Value):
        for bias, inner in (args, args[::-1]):
            found = norm_of(values, inner, base) if _is_vector(values, bias, v) else None
            if found and found.norm.centred and found.norm.bias is None and found.factor == 1:
                norm = replace(found.norm, bias=values.peel(bias).name)
                return NormFound(norm, found.x, 1.0)
        return None
    product = product_of(values, v, base)
    if len(product.inverse_roots) != 1:
        return None
    return _norm_by_formula(values, product)


def _norm_by_function(values: Values, v: Value) -> NormFound | None:
    op, (x, shape, weight, *bias, eps) = values.term(v)
    shape = tuple(map(int, (shape,) if isinstance(shape, int) else shape))
    norm = Norm(op == "layer_norm", shape, values.default_eps if eps is None else float(eps))
    if weight is not None:
        found = _weight_of(values, weight, shape)
        if found is None:
            return None
        norm = replace(norm, weight=found[0], zero_centred_weight=found[1])
    if bias and bias[0] is not None:
        vector = values.peel(bias[0])
        if vector.origin != "parameter" or vector.shape != shape:
            return None
        norm = replace(norm, bias=vector.name)
    return NormFound(norm, values.peel(x), 1.0)


def _norm_by_formula(values: Values, product: Product) -> NormFound | None:
    op, args = values.term(product.inverse_roots[0])
    if op != "add" or not is_number(args[1]):
        return None
    found = _mean_square(values, args[0])
    if found is None:
        return None
    x, centred = found
    # The mean may be subtracted once for the variance and once more for the result.
    numerators = [v for v in product.values if (_centred(values, v) if centred else v) is x]
    rest = product.without(*numerators[:1])
    if not numerators or rest is None or len(rest.values) > 1:
        return None
    norm = Norm(centred, x.shape[-1:], float(args[1]))
    if rest.values:
        weight = _weight_of(values, rest.values[0], norm.shape)
        if weight is None:
            return None
        norm = replace(norm, weight=weight[0], zero_centred_weight=weight[1])
    return NormFound(norm, x, rest.factor)


def _mean_square(values: Values, v: Value) -> tuple[Value, bool] | None:
    """(x, whether its mean is subtracted) of the mean square of x over the last dimension."""
    op, args = values.term(v)
    if op == "var" and args[1:] == (-1, True, 0):
        return values.peel(args[0]), True
    if op != "mean" or args[1:] != (-1, True):
        return None
    op, args = values.term(args[0])
    if op != "square":
        return None
    y = values.peel(args[0])
    x = _centred(values, y)
    return (y, False) if x is None else (x, True)


def _centred(values: Values, y: Value) -> Value | None:
    """The x of a y that is x minus its mean over the last dimension."""
    op, args = values.term(y)
    if op != "sub" or not all(isinstance(a, Value) for a in args):
        return None
    x, (op, of) = values.peel(args[0]), values.term(args[1])
    return x if op == "mean" and of[1:] == (-1, True) and values.peel(of[0]) is x else None


def _weight_of(values: Values, v: Value, shape: tuple[int, ...]) -> tuple[str, bool] | None:
    """The path of the parameter that scales a norm, and whether one is added to it."""
    op, args = values.term(v)
    plus_one = op == "add" and is_number(args[1]) and args[1] == 1
    weight = values.peel(args[0] if plus_one else v)
    if weight.origin != "parameter" or weight.shape != shape:
        return None
    return weight.name, plus_one


def _is_vector(values: Values, v: object, like: Value) -> bool:
    """Whether it is a parameter with a number per column."""
    if not isinstance(v, Value):
        return False
    v = values.peel(v)
    return v.origin == "parameter" and v.shape == like.shape[-1:]


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

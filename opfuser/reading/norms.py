"""How norms look as operations of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from .arguments import is_number
from .dataflow import Value
from .operations import Norm
from .products import Product, product_of
from .projections import vector_of
from .values import Values


class NormFound(NamedTuple):
    """A norm, what it normalizes, and a factor behind it."""

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
            vector = vector_of(values, bias)
            if vector is None or vector.shape != v.shape[-1:]:
                continue
            found = norm_of(values, inner, base)
            if found and found.norm.centered and found.norm.bias is None and found.factor == 1:
                norm = replace(found.norm, bias=vector.name)
                return NormFound(norm, found.x, 1.0)
        return None
    product = product_of(values, v, base)
    if len(product.inverse_roots) != 1:
        return None
    return _norm_by_formula(values, product)


def _norm_by_function(values: Values, v: Value) -> NormFound | None:
    op, (x, shape, weight, *bias, eps) = values.term(v)
    shape = tuple(map(int, (shape,) if isinstance(shape, int) else shape))
    if len(shape) != 1:
        return None
    norm = Norm(op == "layer_norm", shape, values.default_eps if eps is None else float(eps))
    if weight is not None:
        found = _weight_of(values, weight, shape)
        if found is None:
            return None
        norm = replace(norm, **found)
    if bias and bias[0] is not None:
        vector = vector_of(values, bias[0])
        if vector is None or vector.shape != shape:
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
    x, centered = found
    # The mean may be subtracted once for the variance and once more for the result.
    numerators = [v for v in product.values if (_centered(values, v) if centered else v) is x]
    rest = product.without(*numerators[:1])
    if not numerators or rest is None or len(rest.values) > 1:
        return None
    norm = Norm(centered, x.shape[-1:], float(args[1]))
    if rest.values:
        weight = _weight_of(values, rest.values[0], norm.shape)
        if weight is None:
            return None
        norm = replace(norm, **weight)
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
    x = _centered(values, y)
    return (y, False) if x is None else (x, True)


def _centered(values: Values, y: Value) -> Value | None:
    """The x of a y that is x minus its mean over the last dimension."""
    op, args = values.term(y)
    if op != "sub" or not all(isinstance(a, Value) for a in args):
        return None
    x, (op, of) = values.peel(args[0]), values.term(args[1])
    return x if op == "mean" and of[1:] == (-1, True) and values.peel(of[0]) is x else None


def _weight_of(values: Values, v: Value, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """What is known of the weight that scales a norm: fields of a Norm."""
    op, args = values.term(v)
    plus_one = op == "add" and is_number(args[1]) and args[1] == 1
    weight = vector_of(values, args[0] if plus_one else v)
    if weight is None or weight.shape != shape:
        return None
    is_cast = not plus_one and values.is_cast(weight)
    return {"weight": weight.name, "zero_centered_weight": plus_one, "weight_is_cast": is_cast}

"""Products of values as sets of factors, so that neither order nor notation matters."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import is_number
from .dataflow import Value
from .values import Values


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

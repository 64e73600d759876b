"""Patterns of FX nodes: how a formula may be written with functions of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any, NamedTuple

from torch import fx

from .tracing import facts_of, name_of

__all__ = [
    "Binding", "Either", "Lifted", "Number", "Op", "Pattern", "Product", "Through", "Var",
    "heads", "is_altered", "is_last", "is_parameter", "matches", "operands", "uncast",
]  # fmt: skip

CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type_as", "type", "contiguous"})
VIEWS = frozenset({"view", "reshape", "flatten", "contiguous"})


class Var(NamedTuple):
    """A tensor of any origin; the same one wherever a pattern has its name.

    Attributes:
        name: under which it is found.
        accepts: what else has to hold of the node.
    """

    name: str
    accepts: Callable[[fx.Node], bool] | None = None


class Number(NamedTuple):
    """A Python number.

    Attributes:
        value: to 4 digits; None is any, which is found as ``name``.
    """

    value: float | None = None
    name: str = ""


class Op(NamedTuple):
    """A call of a function with these operands first; add and mul take theirs in any order.

    Attributes:
        names: of the function, separated by blanks.
        args: patterns of its operands.
        accepts: what else has to hold of the node.
    """

    names: str
    args: tuple[Any, ...] = ()
    accepts: Callable[[fx.Node], bool] | None = None


class Product(NamedTuple):
    """A product of factors in any order and association; numbers are multiplied.

    Attributes:
        factors: patterns.
        number: the product of the numbers.
    """

    factors: tuple[Any, ...]
    number: float = 1.0


class Through(NamedTuple):
    """``inner``, or calls of these functions with an operand that is."""

    names: str
    inner: Any


class Either(NamedTuple):
    """One of several patterns."""

    options: tuple[Any, ...]


class Lifted(NamedTuple):
    """The output of what was found before.

    Attributes:
        name: under which the node is found.
        accepts: whether it is the output of what is sought.
    """

    name: str
    accepts: Callable[[fx.Node], bool]


Pattern = Var | Number | Op | Product | Through | Either | Lifted


class Binding(NamedTuple):
    """What a pattern has found.

    Attributes:
        values: by name.
        nodes: that it covers.
    """

    values: dict[str, Any]
    nodes: frozenset[fx.Node]

    def bind(self, name: str, value: Any) -> Binding | None:
        """With a value under a name; None if there is another one."""
        if name and self.values.get(name, value) != value:
            return None
        return Binding({**self.values, name: value}, self.nodes)

    def cover(self, *nodes: fx.Node) -> Binding:
        """With more nodes."""
        return Binding(self.values, self.nodes.union(nodes))


EMPTY = Binding({}, frozenset())
COMMUTATIVE = frozenset({"add", "mul"})


def operands(node: fx.Node) -> list[Any]:
    """Nodes and numbers among the arguments of a call, those in lists too."""
    found: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                collect(item)
        elif isinstance(value, fx.Node) or type(value) in (int, float):
            found.append(value)

    collect(node.args)
    collect([v for k, v in node.kwargs.items() if k not in ("dim", "alpha", "dtype")])
    return found


def is_altered(node: fx.Node) -> bool:
    """Whether a keyword makes a sum or a quotient something else than its operands say."""
    alpha: Any = node.kwargs.get("alpha", 1)
    scaled: bool = name_of(node) in ("add", "sub") and alpha != 1
    return scaled or node.kwargs.get("rounding_mode") is not None


def uncast(value: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """What a value was before conversions of its dtype, and these."""
    casts: list[fx.Node] = []
    while name_of(value) in CASTS:
        casts.append(value)
        value = value.args[0]
    return value, tuple(casts)


def matches(pattern: Pattern, value: Any, found: Binding = EMPTY) -> Iterator[Binding]:
    """The ways in which a pattern fits a value, given what was found so far."""
    if isinstance(pattern, Either):
        for option in pattern.options:
            yield from matches(option, value, found)
        return
    if isinstance(pattern, Number):
        if type(value) in (int, float) and (
            pattern.value is None or math.isclose(value, pattern.value, rel_tol=1e-4)
        ):
            bound = found.bind(pattern.name, value)
            if bound is not None:
                yield bound
        return
    value, casts = uncast(value)
    if not isinstance(value, fx.Node):
        return
    found = found.cover(*casts)
    if isinstance(pattern, (Var, Lifted)):
        if pattern.accepts is None or pattern.accepts(value):
            bound = found.bind(pattern.name, value)
            if bound is not None:
                yield bound
    elif isinstance(pattern, Op):
        yield from _of_call(pattern, value, found)
    elif isinstance(pattern, Product):
        yield from _of_product(pattern, value, found)
    else:
        yield from _behind(pattern, value, found, 6)


def heads(pattern: Pattern) -> frozenset[str] | None:
    """The names of functions with which a pattern may end; None if that may be any."""
    if isinstance(pattern, Either):
        found = [heads(option) for option in pattern.options]
        known = [names for names in found if names is not None]
        return frozenset().union(*known) if len(known) == len(found) else None
    if isinstance(pattern, Product):
        return frozenset({"mul", "div"})
    return frozenset(pattern.names.split()) if isinstance(pattern, Op) else None


def _of_call(pattern: Op, node: fx.Node, found: Binding) -> Iterator[Binding]:
    name = name_of(node)
    if name not in pattern.names.split() or is_altered(node):
        return
    if pattern.accepts is not None and not pattern.accepts(node):
        return
    given = operands(node)
    own, rest = given[: len(pattern.args)], given[len(pattern.args) :]
    if len(own) < len(pattern.args) or any(isinstance(r, fx.Node) for r in rest):
        return
    orders = [own, own[::-1]] if name in COMMUTATIVE else [own]
    for order in orders:
        yield from _all(pattern.args, order, found.cover(node))


def _all(patterns: tuple[Any, ...], values: list[Any], found: Binding) -> Iterator[Binding]:
    if not patterns:
        yield found
        return
    for one in matches(patterns[0], values[0], found):
        yield from _all(patterns[1:], values[1:], one)


def _of_product(pattern: Product, node: fx.Node, found: Binding) -> Iterator[Binding]:
    for deep in (True, False):
        number, factors, nodes = _factors(node, deep)
        fits = len(factors) == len(pattern.factors)
        if not fits or not nodes or not math.isclose(number, pattern.number, rel_tol=1e-4):
            continue
        for order in permutations(factors):
            yield from _all(pattern.factors, list(order), found.cover(*nodes))


def _factors(node: fx.Node, deep: bool) -> tuple[float, list[fx.Node], list[fx.Node]]:
    """The number, the tensors and the nodes of a product; no nodes if it is none."""
    number, factors, nodes = 1.0, [], []

    def collect(value: Any, outermost: bool) -> None:
        nonlocal number
        inner, casts = uncast(value)
        if not isinstance(inner, fx.Node):
            number *= inner
            return
        name = "" if is_altered(inner) else name_of(inner)
        given = operands(inner) if name in ("mul", "div") else []
        single = len(inner.users) == 1 and not inner.meta.get("lifted")
        by_number = name == "div" and len(given) == 2 and not isinstance(given[1], fx.Node)
        by_number = by_number and given[1] != 0
        if (name == "mul" or by_number) and (outermost or (deep and single)):
            nodes.extend([inner, *casts])
            if by_number:
                number /= given[1]
                given = given[:1]
            for operand in given:
                collect(operand, False)
            return
        factors.append(value)

    collect(node, True)
    return number, factors, nodes


def _behind(pattern: Through, node: fx.Node, found: Binding, left: int) -> Iterator[Binding]:
    inside = False
    for one in matches(pattern.inner, node, found):
        inside = True
        yield one
    if inside or not left or name_of(node) not in pattern.names.split():
        return
    for operand in operands(node):
        value, casts = uncast(operand)
        if isinstance(value, fx.Node):
            yield from _behind(pattern, value, found.cover(node, *casts), left - 1)


def is_last(node: fx.Node) -> bool:
    """Whether a function works along the last dimensions of its first operand, and keeps them."""
    given, made = facts_of(node.all_input_nodes[0]), facts_of(node)
    default = node.kwargs.get("dim", node.kwargs.get("axis"))
    dim = node.args[1] if len(node.args) > 1 else default
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if given is None or made is None or not all(type(d) is int for d in dims):
        return False
    rank = len(given.shape)
    last = list(range(rank - len(dims), rank))
    return len(made.shape) == rank > 0 and sorted(d % rank for d in dims) == last


def is_parameter(dims: int) -> Callable[[Any], bool]:
    """Whether an argument is a node that reads a parameter or buffer of so many dimensions."""

    def accepts(node: Any) -> bool:
        facts = facts_of(node)
        return facts is not None and node.op == "get_attr" and len(facts.shape) == dims

    return accepts

"""Linear functions, and children that stand for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .arguments import CASTS
from .dataflow import Call, Node, Value, values_in
from .kept import KeptError
from .operations import Adapter, GivenCache, Input, Linear, LoRALinear
from .products import product_of
from .reads import is_scalar
from .replay import origin_of, source_of
from .sizes import Size
from .stand_ins import CacheStandIn, LayerIndex
from .values import Values


class LinearFound(NamedTuple):
    """A linear function, its argument, and the nodes of dropout inside."""

    linear: Linear | LoRALinear
    x: Value
    once: tuple[Node, ...] = ()


def linear_of(values: Values, v: Value) -> LinearFound | None:
    """The linear function of parameters that a value is the result of."""
    v = values.peel(v)
    found = _linear_of(values, v)
    if found is None and values.term(v).op == "add" and _is_rounded(values, v):
        return _adapted(values, v)
    return found


def _is_rounded(values: Values, v: Value) -> bool:
    """Whether a value has the stream's dtype, or is cast to that wherever it is read."""
    if v.meta.dtype in values.dtypes:
        return True
    nodes = values.dataflow.nodes
    readers = [n for n in nodes if any(x is v for x in values_in((n.args, n.kwargs)))]
    return bool(readers) and all(
        n.op in CASTS and n.results[0].meta.dtype in values.dtypes for n in readers
    )


def _adapted(values: Values, v: Value) -> LinearFound | None:
    """A linear function plus products of low rank of the same input."""
    v = values.peel(v)
    op, args = values.term(v)
    if op != "add" or any(not isinstance(a, Value) or a.shape != v.shape for a in args):
        return _linear_of(values, v)
    with suppress(KeptError):  # what is rounded in between is no such sum
        for inner, branch in (args, args[::-1]):
            found = _adapted(values, inner)
            adapter = None if found is None else _adapter_of(values, branch, found.x)
            if found is None or adapter is None:
                continue
            base = found.linear
            if isinstance(base, LoRALinear):
                whole = LoRALinear(base.linear, (*base.adapters, adapter[0]))
            else:
                whole = LoRALinear(base, adapter[:1])
            return LinearFound(whole, found.x, found.once + adapter[1])
    return _linear_of(values, v)


def _adapter_of(values: Values, v: Value, x: Value) -> tuple[Adapter, tuple[Node, ...]] | None:
    """The product of low rank of a linear function's argument that a value is."""
    product = product_of(values, v, None)
    if len(product.values) != 1 or product.inverse_roots:
        return None
    up = _matrix_of(values, product.values[0])
    down = None if up is None else _matrix_of(values, up[1])
    if up is None or down is None:
        return None
    given, p = values.peel(down[1]), 0.0
    once: tuple[Node, ...] = ()
    op, args = values.term(given)
    if op == "dropout":
        p, once = float(args[1]), () if given.node is None else (given.node,)
        given = values.peel(args[0])
    if given is not values.peel(x):
        return None
    # The linear function takes the numbers that the adapter takes, and no others.
    if values.autocast is None and len({t.meta.dtype for t in values.passed(x)}) > 1:
        return None
    return Adapter(down[0].name, up[0].name, up[0].shape[1], product.factor, p), once


def _matrix_of(values: Values, v: Value) -> tuple[Value, Value] | None:
    """The parameter that a value is a product with, in whatever dtype, and its argument."""
    op, args = values.term(v)
    if op != "linear" or args[2] is not None or not _is_matrix(args[1]):
        return None
    return args[1], args[0]


def _linear_of(values: Values, v: Value) -> LinearFound | None:
    op, args = values.term(v)
    if v.meta.dtype not in values.dtypes:
        return None
    if op == "linear":
        return _linear(values, *args)
    if op == "matmul":
        return _product(values, *args)
    if op == "addmm":
        bias, x, weight = args
        return _with_bias(values, _product(values, x, weight), bias)
    if op == "add":
        for inner, bias in (args, args[::-1]):
            if vector_of(values, bias) and isinstance(inner, Value):
                return _with_bias(values, _linear_of(values, values.peel(inner)), bias)
    return None


def _linear(values: Values, x: Value, weight: Any, bias: Any) -> LinearFound | None:
    if not _is_matrix(weight):
        return None
    if values.autocast is None and x.meta.dtype != weight.meta.dtype:  # which torch refuses
        return None
    out_features, in_features = weight.shape
    found = LinearFound(Linear(weight.name, None, in_features, out_features), x)
    return found if bias is None else _with_bias(values, found, bias)


def _product(values: Values, x: Any, weight: Any) -> LinearFound | None:
    """The product x W or x W^T."""
    if not isinstance(x, Value) or not isinstance(weight, Value) or len(weight.shape) != 2:
        return None
    matrix = source_of(values, weight)
    if matrix is None or not _is_matrix(matrix) or len(x.shape) < 2:
        return None
    if matrix.meta.dtype != weight.meta.dtype:  # what is cast is not the parameter itself
        return None
    in_features, out_features = weight.shape
    if matrix is not weight and not _is_transposed(weight, matrix):
        return None
    linear = Linear(matrix.name, None, in_features, out_features, matrix is weight)
    return LinearFound(linear, x)


def _is_transposed(weight: Value, matrix: Value) -> bool:
    node = weight.node
    if node is not None and node.op in ("t", "T", "mT") and node.args[0] is matrix:
        return True
    whole = torch.arange(matrix.meta.numel(), device="cpu").view(matrix.shape)
    return torch.equal(origin_of(weight, matrix), whole.T)


def _with_bias(values: Values, found: LinearFound | None, bias: Any) -> LinearFound | None:
    if found is None or not isinstance(found.linear, Linear) or not isinstance(bias, Value):
        return None
    if (
        found.linear.bias is not None
        or bias.origin != "parameter"
        or bias.shape != (found.linear.out_features,)
    ):
        return None
    return found._replace(linear=replace(found.linear, bias=bias.name))


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, Value) and weight.origin == "parameter" and len(weight.shape) == 2


def vector_of(values: Values, v: Any) -> Value | None:
    """The parameter of one dimension that a value is."""
    if not isinstance(v, Value):
        return None
    v = values.peel(v)
    return v if v.origin == "parameter" and len(v.shape) == 1 else None


class CallFound(NamedTuple):
    """A call of a child with one stream, and the one of its results that is looked for.

    Attributes:
        arguments: as of ``operations.Called``.
    """

    call: Call
    x: Value
    result: Value
    arguments: Any


def calls_returning(values: Values, found: Sequence[Value]) -> Iterator[CallFound]:
    """The calls of children that return one of these values of one stream, innermost first."""
    for call in reversed(values.dataflow.calls):
        for result in values_in(call.result):
            x = _stream_of(values, call, result)
            if x is None or x in found:
                continue
            if result in found or values.equals(result, found[-1]):
                with suppress(KeptError):
                    yield CallFound(call, x, result, _arguments_of(values, call, x))


def _stream_of(values: Values, call: Call, result: Value) -> Value | None:
    """The tensor that a child was called with besides inputs, if it returned such rows."""
    given = list(dict.fromkeys(values_in((call.args, call.kwargs))))
    others = [v for v in given if v.origin != "input"]
    if len(others) > 1 or not result.shape:
        return None
    for x in others or given:
        rows = x.shape[:-1], (math.prod(x.shape[:-1]),)
        of_stream = all(t.meta.dtype in values.dtypes for t in (x, result))
        if x.shape and of_stream and result.shape[:-1] in rows:
            return x
    return None


def _arguments_of(values: Values, call: Call, x: Value) -> Any:
    """What a child was called with, as of ``operations.Called``.

    Raises:
        KeptError: there is more than tensors, constants, a cache, and tuples of them.
    """

    def argument(given: Any) -> Any:
        if given is x:
            return ...
        if isinstance(given, Value) and given.origin == "input":
            return Input(values.dataflow.inputs.index(given))
        if type(given) is CacheStandIn and given.is_first:
            return GivenCache()
        if type(given) is tuple:
            return tuple(map(argument, given))
        if is_scalar(given) and not isinstance(given, (Size, LayerIndex)):
            return given
        raise KeptError(f"passes a {type(given).__name__} to '{call.path}'")

    if call.args == (x,) and not call.kwargs:
        return None
    keywords = tuple((name, argument(given)) for name, given in call.kwargs.items())
    return tuple(map(argument, call.args)), keywords

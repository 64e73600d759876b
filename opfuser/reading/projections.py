"""Linear functions, and children that stand for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .dataflow import Call, Value, values_in
from .operations import Linear
from .replay import origin_of, source_of
from .values import Values

__all__ = ["CallFound", "LinearFound", "calls_returning", "linear_of", "vector_of"]


class LinearFound(NamedTuple):
    """A linear function and its argument."""

    linear: Linear
    x: Value


def linear_of(values: Values, v: Value) -> LinearFound | None:
    """The linear function of parameters that a value is the result of."""
    v = values.peel(v)
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
                return _with_bias(values, linear_of(values, inner), bias)
    return None


def _linear(values: Values, x: Value, weight: Any, bias: Any) -> LinearFound | None:
    if not _is_matrix(weight):
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
    whole = torch.arange(in_features * out_features)
    if matrix is weight:
        return LinearFound(Linear(matrix.name, None, in_features, out_features, True), x)
    if not torch.equal(origin_of(weight, matrix), whole.view(out_features, in_features).T):
        return None
    return LinearFound(Linear(matrix.name, None, in_features, out_features), x)


def _with_bias(values: Values, found: LinearFound | None, bias: Any) -> LinearFound | None:
    if found is None or found.linear.bias is not None or not isinstance(bias, Value):
        return None
    if bias.origin != "parameter" or bias.shape != (found.linear.out_features,):
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
    """A call of a child with one tensor, and the one of its results that is looked for."""

    call: Call
    x: Value
    result: Value

    @property
    def item(self) -> int | None:
        """The place among the tensors that the child returns; None if rows are all it returns."""
        alone = self.call.result is self.result and self.x.shape[:-1] == self.result.shape[:-1]
        return None if alone else list(values_in(self.call.result)).index(self.result)


def calls_returning(values: Values, found: Sequence[Value]) -> Iterator[CallFound]:
    """The calls of children that return one of these values of one tensor, innermost first."""
    for call in reversed(values.dataflow.calls):
        for result in values_in(call.result):
            x = _only_tensor(values, call, result)
            if x is None or x in found:
                continue
            if result in found or values.equals(result, found[-1]):
                yield CallFound(call, x, result)


def _only_tensor(values: Values, call: Call, result: Value) -> Value | None:
    """The tensor that a child was called with, if that is all, and it returned such rows."""
    if len(call.args) != 1 or call.kwargs:
        return None
    (x,) = call.args
    if not isinstance(x, Value) or not x.shape or not result.shape:
        return None
    if any(t.meta.dtype not in values.dtypes for t in (x, result)):
        return None
    return x if result.shape[:-1] in (x.shape[:-1], (math.prod(x.shape[:-1]),)) else None

"""Linear functions, and children that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .dataflow import Call, Dataflow, Value
from .operations import Linear
from .replay import origin_of, source_of
from .values import Values

__all__ = ["LinearFound", "calls_returning", "linear_of", "only_tensor", "vector_of"]


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


def calls_returning(dataflow: Dataflow, found: Sequence[Value]) -> list[Call]:
    """The calls of children with one tensor that return one of these values, innermost first."""
    calls = [call for call in dataflow.calls if any(call.result is v for v in found)]
    return [c for c in reversed(calls) if (x := only_tensor(c)) is not None and x not in found]


def only_tensor(call: Call) -> Value | None:
    """The tensor that a child was called with, if that is all, and rows became rows."""
    if len(call.args) != 1 or call.kwargs or not isinstance(call.result, Value):
        return None
    (x,) = call.args
    if not isinstance(x, Value) or not x.shape or x.shape[:-1] != call.result.shape[:-1]:
        return None
    return x

"""Mixtures of experts whose rows are copied for each of their experts."""

from __future__ import annotations

from typing import Any

from .dataflow import Node, Value
from .expert_parts import Form, Mixed, stripped
from .values import Values


def experts_by_rows(values: Values, v: Value) -> tuple[Mixed, tuple[Node, ...]] | None:
    """The sum of what was computed for copies of each row, and nodes with an effect."""
    op, args = values.term(v)
    if op != "sum" or len(args[0].shape) != 3 or args[1] not in (1, -2) or args[2]:
        return None
    rows, top_k, _ = args[0].shape
    op, args = values.term(args[0])
    inverse = None
    if op == "__getitem__" and isinstance(args[1], Value):
        inverse = args[1]
        op, args = values.term(args[0])
    if op != "mul" or not all(isinstance(a, Value) for a in args):
        return None
    for out, column in (args, args[::-1]):
        weights = _of_column(values, column, out)
        if weights is None:
            continue
        form: Form | None = _Gathered(values, None)
        if inverse is not None:
            op, args = values.term(weights)
            if op != "__getitem__":
                return None
            weights, form = args[0], _form_of_sorted(values, args[1], inverse)
        if form is None:
            return None
        mixed = form.mixed(out, stripped(values, weights), top_k)
        return None if mixed is None or mixed.x.shape[0] != rows else (mixed, form.written)
    return None


class _Sorted(Form):
    multiplies_whole = True

    def __init__(self, values: Values, node: Node, filled: Node) -> None:
        super().__init__(values, stripped(values, node.args[0]))
        self.ids, self.order = node.results
        self.written = (filled,)

    def is_expert(self, index: Any) -> bool:
        return isinstance(index, Value) and self.values.peel(index) is self.ids

    def rows(self, v: Value, top_k: int) -> Value | None:
        op, args = self.values.term(v)
        if op != "__getitem__" or not isinstance(args[1], Value):
            return None
        op, divided = self.values.term(args[1])
        if op != "floor_divide" or divided[0] is not self.order:
            return None
        return args[0] if divided[1] == top_k and len(args[0].shape) == 2 else None

    def product(self, v: Value) -> tuple[Value, Value, bool] | None:
        op, args = self.values.term(v)
        if op != "grouped_mm" or args[3] is not None or args[4] is not None:
            return None
        x, weight, ends = args[:3]
        op, args = self.values.term(weight)
        turned = op == "transpose"
        if turned:
            weight, *dims = args
            if {d % 3 for d in dims} != {1, 2}:
                return None
        count = weight.shape[0]
        return (x, weight, not turned) if self._ends_groups(ends, count) else None

    def _ends_groups(self, v: Any, count: int) -> bool:
        """Whether it holds the ends of the rows of each expert."""
        if not isinstance(v, Value):
            return False
        op, args = self.values.term(v)
        if op != "cumsum" or args[1] != 0:
            return False
        op, args = self.values.term(args[0])
        if op != "histc" or args[1:] != (count, 0, count - 1):
            return False
        op, args = self.values.term(args[0])
        return op in ("cast", "int", "long") and self.values.peel(args[0]) is self.ids


def _form_of_sorted(values: Values, order: Any, inverse: Value) -> Form | None:
    """Rows that are sorted by expert, if ``inverse`` is the inverse of their order."""
    node = order.node if isinstance(order, Value) else None
    if node is None or values.term(order).op != "sort" or order is not node.results[1]:
        return None
    if len(order.shape) != 1 or values.term(order).args[2]:  # the largest first
        return None
    filled = inverse.node
    if filled is None or filled.effect != "writes in place by __setitem__":
        return None
    empty, at, numbers = filled.args
    if at is not order or values.term(empty).op != "empty_like" or empty.shape != order.shape:
        return None
    op, args = values.term(numbers)
    return _Sorted(values, node, filled) if op == "arange" and args[:1] == order.shape else None


class _Gathered(Form):
    """Rows of which each is multiplied by the parameters of its expert: the first index says it."""

    def is_expert(self, index: Any) -> bool:
        if not isinstance(index, Value):
            return False
        self.experts = self.experts or stripped(self.values, index)
        return super().is_expert(index)

    def rows(self, v: Value, top_k: int) -> Value | None:
        op, args = self.values.term(v)
        if op != "repeat_interleave" or args[1:3] != (top_k, 0) or len(args[0].shape) != 2:
            return None
        x: Value = args[0]
        return x

    def product(self, v: Value) -> tuple[Value, Value, bool] | None:
        op, args = self.values.term(v)
        if op == "squeeze" and args[0].shape == (*v.shape, 1):
            op, args = self.values.term(args[0])
            weight = self.parameter(args[0]) if op == "matmul" else None
            op, inner = self.values.term(args[1]) if weight else ("", ())
            return (inner[0], weight, False) if weight and op == "unsqueeze" else None
        weight = self.parameter(args[1]) if op == "matmul" else None
        if weight is None or len(args[0].shape) != 3 or args[0].shape[1] != 1:
            return None
        return args[0], weight, True


def _of_column(values: Values, column: Value, like: Value) -> Value | None:
    """The numbers, one per row, that a column is made of."""
    if column.shape != (*like.shape[:-1], 1):
        return None
    op, args = values.term(column)
    if op == "__getitem__" and args[1] in ((slice(None), None), (..., None)):
        return values.peel(args[0])
    return values.peel(args[0]) if op in ("unsqueeze", "reshape") else None

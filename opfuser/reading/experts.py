"""How mixtures of experts look as operations of torch: rows by expert, or a loop over experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .activations import activations_in, clamped_pair
from .dataflow import Call, Node, Value, values_in
from .kept import KeptError
from .operations import Activation, Called, Experts, ExpertsLinear, Gated
from .products import product_of
from .values import Values, computed, located

__all__ = ["ExpertsFound", "experts_of"]


class ExpertsFound(NamedTuple):
    """Experts, the rows that they are of, and what belongs to them.

    Attributes:
        experts: what they compute.
        x: the rows.
        router: the call that has chosen them.
        written: nodes with an effect that choosing rows has.
    """

    experts: Experts
    x: Value
    router: Call
    written: frozenset[Node]


def experts_of(values: Values, v: Value) -> ExpertsFound | None:
    """The mixture of experts that a value is the result of.

    Raises:
        KeptError: it is one that opfuser has no operation for, or whose router is no child.
    """
    if values.autocast is not None:
        return None
    found = _by_rows(values, v) or _by_loop(values, v)
    if found is None:
        return None
    mixed, written = found
    router = _router_of(values, mixed, v)
    weights, indices = (_place_of(values, router, of) for of in (mixed.weights, mixed.indices))
    (given,) = router.args
    reason = "chooses experts"
    called = Called(router.path, given.shape[-1], mixed.top_k, reason)
    flat = len(given.shape) == 2
    experts = Experts(called, weights, indices, flat, mixed.up, mixed.activation, mixed.down)
    return ExpertsFound(experts, mixed.x, router, frozenset(written))


class _Mixed(NamedTuple):
    """A sum over experts: ``y = Σ_j w_j down(f(up(x)))``, w and the experts of shape (rows, j)."""

    x: Value
    indices: Value
    weights: Value
    top_k: int
    up: ExpertsLinear
    activation: Activation | Gated
    down: ExpertsLinear


class _Linear(NamedTuple):
    linear: ExpertsLinear
    x: Value


# Rows in the order of their experts, and rows of which each has weights of its own


def _by_rows(values: Values, v: Value) -> tuple[_Mixed, tuple[Node, ...]] | None:
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
        form: _Form | None = None
        if inverse is None:
            form = _form_of_gathered(values, out)
        else:
            op, args = values.term(weights)
            if op != "__getitem__":
                return None
            weights, form = args[0], _form_of_sorted(values, args[1], inverse)
        if form is None:
            return None
        down = form.linear(out)
        if down is None:
            return None
        activation, hidden = _activation_of(values, down.x)
        up = form.linear(hidden)
        x = None if up is None else form.rows(up.x, top_k)
        if up is None or x is None or x.shape[0] != rows:
            return None
        parts = up.linear, activation, down.linear
        given = _stripped(values, form.experts), _stripped(values, weights)
        return _Mixed(x, *given, top_k, *parts), form.written
    return None


class _Form:
    """How rows that are computed by different experts are written.

    Attributes:
        values: of the dataflow.
        experts: the expert of each row.
        written: nodes with an effect that belong to it.
    """

    def __init__(self, values: Values, experts: Value) -> None:
        self.values, self.experts = values, experts
        self.written: tuple[Node, ...] = ()

    def rows(self, v: Value, top_k: int) -> Value | None:
        """What rows are copies of, each of so many."""
        raise NotImplementedError

    def product(self, v: Value) -> tuple[Value, Value, bool] | None:
        """(x, weights of all experts, whether these are stored as (in, out)) of a product."""
        raise NotImplementedError

    def is_expert(self, index: Any) -> bool:
        """Whether parameters that are indexed so are those of the expert of each row."""
        return isinstance(index, Value) and _stripped(self.values, index) is self.experts

    def linear(self, v: Value) -> _Linear | None:
        """The linear functions that rows are the results of."""
        op, args = self.values.term(v)
        bias = None
        if op == "add" and isinstance(args[1], Value):
            for inner, added in (args, args[::-1]):
                bias = self.parameter(added)
                if bias is not None:
                    v = inner
                    break
        found = self.product(v)
        if found is None:
            return None
        x, weight, transposed = found
        if len(weight.shape) != 3 or weight.origin != "parameter":
            return None
        if transposed:
            raise KeptError("has experts whose weights are stored as (in, out)")
        count, out_features, in_features = weight.shape
        if bias is not None and bias.shape != (count, out_features):
            return None
        if any(t.meta.dtype not in self.values.dtypes for t in (weight, self.values.peel(v))):
            return None
        name = None if bias is None else bias.name
        made = ExpertsLinear(weight.name, name, count, in_features, out_features)
        return _Linear(made, x)

    def parameter(self, v: Any) -> Value | None:
        """The parameter of all experts that a value has the entries of."""
        if not isinstance(v, Value):
            return None
        op, args = self.values.term(v)
        if op != "__getitem__" or not self.is_expert(args[1]):
            return None
        whole = args[0]
        return whole if whole.origin == "parameter" else None


class _Sorted(_Form):
    def __init__(self, values: Values, node: Node, filled: Node) -> None:
        super().__init__(values, _stripped(values, node.args[0]))
        self.ids, self.order = node.results
        self.written = (filled,)

    def is_expert(self, index: Any) -> bool:
        return isinstance(index, Value) and self.values.peel(index) is self.ids

    def rows(self, v: Value, top_k: int) -> Value | None:
        op, args = self.values.term(v)
        if op != "__getitem__" or not isinstance(args[1], Value):
            return None
        op, divided = self.values.term(args[1])
        if op not in ("__floordiv__", "floor_divide") or divided[0] is not self.order:
            return None
        return args[0] if divided[1] == top_k and len(args[0].shape) == 2 else None

    def product(self, v: Value) -> tuple[Value, Value, bool] | None:
        op, args = self.values.term(v)
        if op != "grouped_mm" or args[3] is not None or args[4] is not None:
            return None
        x, weight, ends = args[:3]
        turned = weight.node is not None and weight.node.op == "transpose"
        if turned:
            op, (weight, *dims) = self.values.term(weight)
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


def _form_of_sorted(values: Values, order: Any, inverse: Value) -> _Form | None:
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


class _Gathered(_Form):
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


def _form_of_gathered(values: Values, v: Value) -> _Form | None:
    """Rows of which each is multiplied by the parameters of its expert."""
    for at in _inside(values, v):
        op, args = values.term(at)
        if op == "__getitem__" and isinstance(args[1], Value) and args[0].origin == "parameter":
            return _Gathered(values, _stripped(values, args[1]))
    return None


def _inside(values: Values, v: Value) -> Iterator[Value]:
    """The arguments of the operation that computes a value, and of those around a product."""
    _, args = values.term(v)
    for a in values_in(args):
        yield a
        if values.term(a).op in ("matmul", "squeeze"):
            yield from _inside(values, a)


# A loop over experts


def _by_loop(values: Values, v: Value) -> tuple[_Mixed, tuple[Node, ...]] | None:
    """The sum of what a loop over experts adds to rows that begin with zeros."""
    found: list[_Mixed] = []
    experts: list[Any] = []
    sums: list[Node] = []
    written: dict[Node, None] = {}
    at = values.peel(v)
    op, args = values.term(at)
    while op == "index_add":
        if args[1] != 0 or args[4] != 1 or args[0].shape != v.shape:
            return None
        turn = _turn(values, args[2], args[3])
        if turn is None or at.node is None:
            return None
        sums.append(at.node)
        found.append(turn[0])
        experts.append(turn[1])
        written.update(dict.fromkeys(turn[2]))
        at = values.peel(args[0])
        op, args = values.term(at)
    if not found or op not in ("zeros_like", "zeros", "new_zeros") or len(set(found)) > 1:
        return None
    mixed = found[0]
    if any(linear.count != mixed.up.count for linear in (mixed.up, mixed.down)):
        return None
    of_hits = _visits_each(values, experts[::-1], sums[::-1], mixed)
    if of_hits is None:
        return None
    written.update(dict.fromkeys(of_hits))
    return mixed, tuple(written)


def _turn(values: Values, tokens: Value, added: Value) -> tuple[_Mixed, Any, list[Node]] | None:
    """(what one turn of a loop adds, of which expert, its nodes with an effect)."""
    where = tokens.node
    if where is None or where.op != "where" or len(where.args) != 1:
        return None
    op, args = values.term(where.args[0])
    if op != "__getitem__":
        return None
    mask, expert = args
    chosen = _one_hot_of(values, mask)
    if chosen is None:
        return None
    indices, order = chosen
    places = dict(zip(order, where.results))  # by the dimensions of the indices
    if len(where.results) != 2 or tokens is not places[0]:
        return None
    op, args = values.term(added)
    if op != "mul" or not all(isinstance(a, Value) for a in args):
        return None
    for out, column in (args, args[::-1]):
        op, index = values.term(column)
        if op != "__getitem__" or not isinstance(index[1], tuple) or index[1][2:] != (None,):
            continue
        if index[1][0] is not places[0] or index[1][1] is not places[1]:
            return None
        weights = index[0]
        form = _Turn(values, expert, tokens)
        down = form.linear(out)
        if down is None:
            return None
        activation, hidden = _activation_of(values, down.x)
        up = form.linear(hidden)
        x = None if up is None else form.rows(up.x, 1)
        if up is None or x is None or weights.shape != indices.shape:
            return None
        given = _stripped(values, indices), _stripped(values, weights), indices.shape[1]
        mixed = _Mixed(x, *given, up.linear, activation, down.linear)
        return mixed, expert, [where]
    return None


class _Turn(_Form):
    def __init__(self, values: Values, expert: Any, tokens: Value) -> None:
        super().__init__(values, expert)
        self.tokens = tokens

    def is_expert(self, index: Any) -> bool:
        return index is self.experts or (type(index) is int and index == self.experts)

    def rows(self, v: Value, top_k: int) -> Value | None:
        op, args = self.values.term(v)
        if op != "__getitem__" or args[1] is not self.tokens or len(args[0].shape) != 2:
            return None
        x: Value = args[0]
        return x

    def linear(self, v: Value) -> _Linear | None:
        op, args = self.values.term(v)
        if op != "linear" or args[2] is None:
            return super().linear(v)
        return None

    def product(self, v: Value) -> tuple[Value, Value, bool] | None:
        op, args = self.values.term(v)
        if op not in ("linear", "matmul"):
            return None
        weight = self.parameter(args[1])
        return None if weight is None else (args[0], weight, op == "matmul")


def _one_hot_of(values: Values, mask: Value) -> tuple[Value, tuple[int, int]] | None:
    """(indices, the order of their dimensions) of a mask (expert, ...) that is 1 where it is."""
    op, args = values.term(mask)
    if op != "permute":
        return None
    dims = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    op, args = values.term(args[0])
    if op != "one_hot" or len(dims) != 3 or dims[0] % 3 != 2 or len(args[0].shape) != 2:
        return None
    return args[0], (dims[1] % 3, dims[2] % 3)


def _visits_each(
    values: Values, experts: list[Any], sums: list[Node], mixed: _Mixed
) -> list[Node] | None:
    """The nodes by which a loop visits each expert with rows once; None if it does not."""
    count = mixed.up.count
    if all(type(e) is int for e in experts):
        return [] if experts == list(range(count)) else None
    rows = []
    for e in experts:
        op, args = values.term(e) if isinstance(e, Value) else ("", ())
        if op == "__getitem__" and args[1] == 0:
            e = args[0]
        rows.append(e)
    picks = [row.node for row in rows]
    hits = picks[0].args[0] if picks[0] is not None and picks[0].op == "select" else None
    if hits is None or hits.node is None or hits.node.op != "nonzero":
        return None
    if hits.shape[0] != len(picks) or not _takes_turns(values, picks, sums):
        return None
    for number, pick in enumerate(picks):
        if pick is None or (pick.op, pick.args) != ("select", (hits, 0, number)):
            return None
    op, args = values.term(hits.node.args[0])
    if op not in ("greater", "gt") or args[1] != 0:
        return None
    op, args = values.term(args[0])
    mask = args[0] if op == "sum" else None
    dims = args[1] if mask is not None else None
    if not isinstance(dims, (tuple, list)) or {d % 3 for d in dims} != {1, 2} or args[2]:
        return None
    chosen = _one_hot_of(values, mask)
    if chosen is None or _stripped(values, chosen[0]) is not mixed.indices:
        return None
    asked = [n for n in values.dataflow.nodes if n.op == "__bool__" and _is_of(values, n, experts)]
    for node in asked:
        _, compared = values.term(node.args[0])
        if not _is_no_expert(values, compared[1], mixed):
            raise KeptError(located("leaves out experts that there may be", node))
    return [hits.node, *asked]


def _takes_turns(values: Values, picks: list[Any], sums: list[Node]) -> bool:
    """Whether each row was picked behind what the one before it adds."""
    places = {node: number for number, node in enumerate(values.dataflow.nodes)}
    order = [places[node] for pair in zip(picks, sums) for node in pair if node is not None]
    return order == sorted(order)


def _is_of(values: Values, asked: Node, experts: list[Any]) -> bool:
    """Whether it is asked for an expert whether it has some number."""
    op, args = values.term(asked.args[0])
    return op in ("eq", "__eq__") and any(args[0] is e for e in experts)


def _is_no_expert(values: Values, number: Any, mixed: _Mixed) -> bool:
    """Whether it is no number that a router's choice may have."""
    source, count = mixed.indices.node, mixed.up.count
    if not isinstance(number, int) or number < count or source is None:
        return False
    op, args = values.term(mixed.indices)
    if op != "topk" or mixed.indices is not source.results[1]:
        return False
    shape = args[0].shape
    return shape[-1] == count and args[2] in (-1, len(shape) - 1)


# What is common


def _activation_of(values: Values, v: Value) -> tuple[Activation | Gated, Value]:
    """An activation between two linear functions, gated or not, and its argument.

    Raises:
        KeptError: it is none that is known.
    """
    product = product_of(values, v, None)
    for found in activations_in(values, product):
        if found.rest.factor != 1:
            continue
        if not found.rest.values:
            return found.activation, found.x
        if len(found.rest.values) > 1:
            continue
        gate, up = found.x, found.rest.values[0]
        limit, offset = None, 0.0
        clamped = clamped_pair(values, gate, up)
        if clamped is not None:
            gate, up, limit, offset = clamped
        halves = _halves_of(values, gate, up)
        if halves is not None:
            whole, interleaved = halves
            return Gated(found.activation, limit, offset, interleaved), whole
    raise KeptError(computed(v, "has experts that compute"))


def _halves_of(values: Values, gate: Value, up: Value) -> tuple[Value, bool] | None:
    """(the value of whose columns one half gates the other, whether these alternate)."""
    gate, up = values.peel(gate), values.peel(up)
    (op, args), (other, others) = values.term(gate), values.term(up)
    if (op, args[:1]) != (other, others[:1]) or gate.node is None or up.node is None:
        return None
    whole = args[0]
    if op == "chunk" and gate.node is up.node and gate.node.results == [gate, up]:
        dim = args[2] if len(args) > 2 else 0
        return (whole, False) if args[1] == 2 and dim in (-1, len(whole.shape) - 1) else None
    if op != "__getitem__" or not all(_is_of_columns(a[1]) for a in (args, others)):
        return None
    size = whole.shape[-1]
    first, second = (range(size)[a[1][1]] for a in (args, others))
    if (first, second) == (range(0, size, 2), range(1, size, 2)):
        return whole, True
    half = size // 2
    return (whole, False) if (first, second) == (range(half), range(half, 2 * half)) else None


def _is_of_columns(index: Any) -> bool:
    return type(index) is tuple and len(index) == 2 and index[0] is ... and type(index[1]) is slice


def _of_column(values: Values, column: Value, like: Value) -> Value | None:
    """The numbers, one per row, that a column is made of."""
    if column.shape != (*like.shape[:-1], 1):
        return None
    op, args = values.term(column)
    if op == "__getitem__" and args[1] in ((slice(None), None), (..., None)):
        return values.peel(args[0])
    return values.peel(args[0]) if op in ("unsqueeze", "reshape") else None


def _stripped(values: Values, v: Value) -> Value:
    """The value whose entries these are, in the same order."""
    v = values.peel(v)
    while v.node is not None and values.term(v).op in ("reshape", "flatten"):
        v = values.peel(values.term(v).args[0])
    return v


def _router_of(values: Values, mixed: _Mixed, v: Value) -> Call:
    """The call of a child, with the rows alone, that returns the weights and the experts."""
    for call in reversed(values.dataflow.calls):
        returned = [_stripped(values, r) for r in values_in(call.result)]
        if mixed.weights not in returned or mixed.indices not in returned:
            continue
        given = list(values_in((call.args, call.kwargs)))
        if len(call.args) == 1 and not call.kwargs and isinstance(call.args[0], Value):
            if values.peel(given[0]) is values.peel(mixed.x):
                return call
    raise KeptError(computed(v, "has experts that no child chooses, summed"))


def _place_of(values: Values, router: Call, of: Value) -> int:
    """The place among the tensors that a router returns."""
    returned = [_stripped(values, r) for r in values_in(router.result)]
    return returned.index(of)

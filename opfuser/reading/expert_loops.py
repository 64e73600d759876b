"""Mixtures of experts that are loops over the experts."""

from __future__ import annotations

from typing import Any

from .dataflow import Node, Value
from .expert_parts import Form, Mixed, stripped
from .kept import KeptError
from .values import Values, located


def experts_by_loop(values: Values, v: Value) -> tuple[Mixed, tuple[Node, ...]] | None:
    """The sum of what a loop over experts adds to rows that begin with zeros."""
    found: list[Mixed] = []
    experts: list[Any] = []
    sums: list[Node] = []
    chosen: list[Node] = []
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
        chosen.append(args[2].node)
        at = values.peel(args[0])
        op, args = values.term(at)
    if not found or op not in ("zeros_like", "zeros", "new_zeros") or len(set(found)) > 1:
        return None
    mixed = found[0]
    if v.shape[:-1] != mixed.x.shape[:-1]:
        return None
    of_hits = _visits_each(values, experts[::-1], sums[::-1], mixed)
    return None if of_hits is None else (mixed, (*chosen, *of_hits))


def _turn(values: Values, tokens: Value, added: Value) -> tuple[Mixed, Any] | None:
    """(what one turn of a loop adds, of which expert) for the rows that a node has chosen."""
    where = tokens.node
    if where is None or where.op != "where" or len(where.args) != 1:
        return None
    op, args = values.term(where.args[0])
    if op != "__getitem__":
        return None
    mask, expert = args
    one_hot = _one_hot_of(values, mask)
    if one_hot is None:
        return None
    indices, order = one_hot
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
        given = stripped(values, weights), indices.shape[1], stripped(values, indices)
        mixed = _Turn(values, expert, tokens).mixed(out, *given)
        if mixed is None or weights.shape != indices.shape or mixed.x.shape[0] != indices.shape[0]:
            return None
        return mixed, expert
    return None


class _Turn(Form):
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

    def product(self, v: Value) -> tuple[Value, Value, bool] | None:
        op, args = self.values.term(v)
        if op not in ("linear", "matmul") or args[2:] not in ((), (None,)):
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
    values: Values, experts: list[Any], sums: list[Node], mixed: Mixed
) -> list[Node] | None:
    """The nodes by which a loop visits each expert with rows once; None if it does not."""
    count = mixed.up.count
    if all(type(e) is int for e in experts):
        return [] if experts == list(range(count)) else None
    picks = [node for e in experts if (node := _pick_of(values, e)) is not None]
    hits = picks[0].args[0] if len(picks) == len(experts) else None
    if hits is None or hits.node is None or hits.node.op != "nonzero":
        return None
    if hits.shape[0] != len(picks) or not _takes_turns(values, picks, sums):
        return None
    if any(pick.args != (hits, 0, number) for number, pick in enumerate(picks)):
        return None
    op, args = values.term(hits.node.args[0])
    if op != "gt" or args[1] != 0:
        return None
    op, args = values.term(args[0])
    if op != "sum" or not isinstance(args[1], (tuple, list)) or args[2]:
        return None
    chosen = _one_hot_of(values, args[0]) if {d % 3 for d in args[1]} == {1, 2} else None
    if chosen is None or stripped(values, chosen[0]) is not mixed.indices:
        return None
    asked = [n for n in values.dataflow.nodes if n.op == "__bool__" and _is_of(values, n, experts)]
    for node in asked:
        _, compared = values.term(node.args[0])
        if not _is_no_expert(values, compared[1], mixed):
            raise KeptError(located("leaves out experts that there may be", node))
    return [hits.node, *asked]


def _pick_of(values: Values, expert: Any) -> Node | None:
    """The node that picks a row, of which an expert is the one entry or the first."""
    if not isinstance(expert, Value):
        return None
    op, args = values.term(expert)
    row: Value = args[0] if op == "__getitem__" and args[1] == 0 else expert
    return row.node if row.node is not None and row.node.op == "select" else None


def _takes_turns(values: Values, picks: list[Node], sums: list[Node]) -> bool:
    """Whether each row was picked after what the one before it adds."""
    places = {node: number for number, node in enumerate(values.dataflow.nodes)}
    order = [places[node] for pair in zip(picks, sums) for node in pair]
    return order == sorted(order)


def _is_of(values: Values, asked: Node, experts: list[Any]) -> bool:
    """Whether it is asked for an expert whether it has some number."""
    op, args = values.term(asked.args[0])
    return op == "eq" and any(args[0] is e for e in experts)


def _is_no_expert(values: Values, number: Any, mixed: Mixed) -> bool:
    """Whether it is no number that a router's choice may have."""
    source, count = mixed.indices.node, mixed.up.count
    if not isinstance(number, int) or number < count or source is None:
        return False
    op, args = values.term(mixed.indices)
    if op != "topk" or mixed.indices is not source.results[1]:
        return False
    shape = args[0].shape
    return shape[-1] == count and args[2] in (-1, len(shape) - 1)

"""Writes in place to tensors that nothing else looks at: they compute what their results hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..torch_internals import memory_of
from .dataflow import Dataflow, Node, Value, values_in

# What computes the same and writes nothing.
_WITHOUT = {f"{op}_": op for op in "add sub mul div index_add masked_fill".split()}
_WITHOUT |= {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div"}
_EMPTY = frozenset("empty empty_like new_empty".split())


def settle_writes(dataflow: Dataflow) -> None:
    """Turns such writes into nodes without an effect.

    A tensor that is written to is another value from then on. That is all that there is to a write
    if no view of the tensor, and nothing that it is a view of, is read behind it or returned, if
    the tensor was made by the forward, and if nothing may have kept it.

    Args:
        dataflow: of a forward.
    """
    sharing: dict[int, list[tuple[int, Value]]] = {}
    read_last: dict[Value, int] = {}
    for value, number in _made(dataflow):
        sharing.setdefault(_memory(value), []).append((number, value))
    for number, node in enumerate(dataflow.nodes):
        read_last.update(dict.fromkeys(values_in((node.args, node.kwargs)), number))
    read_last.update(dict.fromkeys(values_in(dataflow.result), len(dataflow.nodes)))
    for node in dataflow.nodes:
        if node.op in _EMPTY and not node.effect:
            (empty,) = node.results
            _settle_parts(dataflow, empty, [v for _, v in sharing[_memory(empty)]])
    kept = [
        c for c in dataflow.calls if any(n.op == "effect" for n in dataflow.nodes[c.start : c.end])
    ]
    for number, node in enumerate(dataflow.nodes):
        if node.effect != f"writes in place by {node.op}" or not _is_own(node):
            continue
        same = [(n, v) for n, v in sharing[_memory(node.args[0])] if n < number]
        if any(n < 0 or read_last.get(v, -1) > number for n, v in same):
            continue
        # Hooks, or what a child has done besides, may have kept what a child has returned.
        hooked = any(dataflow.nodes[n].op == "call_module" for n, _ in same)
        if not hooked and not any(c.start <= n < c.end <= number for c in kept for n, _ in same):
            _settle(node)
    for call in list(dataflow.calls):
        inside = dataflow.nodes[call.start : call.end]
        said = dataflow.nodes[call.end : call.end + 1]
        writes = any(node.effect.startswith("writes in place") for node in inside)
        text = f"has '{call.path}' write to its arguments"
        if not writes and [node.effect for node in said] == [text]:
            said[0].effect = ""
            dataflow.calls.remove(call)  # by itself it writes to what it is given


def _made(dataflow: Dataflow) -> Iterator[tuple[Value, int]]:
    """Every value, and the number of the node that made it; -1 for others."""
    for number, node in enumerate(dataflow.nodes):
        for value in values_in((node.args, node.kwargs)):
            if value.node is None:
                yield value, -1
        for value in node.results:
            yield value, number


def _memory(value: Value) -> int:
    return memory_of(value.meta)


def _is_own(node: Node) -> bool:
    """Whether a node writes all that it returns to its first argument, and reads it once."""
    x, *others = values_in((node.args, node.kwargs))
    if not node.args or node.args[0] is not x or [r.meta is x.meta for r in node.results] != [True]:
        return False
    if any(_memory(other) == _memory(x) for other in others):
        return False
    if node.op in _WITHOUT:
        operands = [v.meta if isinstance(v, Value) else v for v in node.args[1:2]]
        return all(torch.result_type(x.meta, operand) == x.meta.dtype for operand in operands)
    return node.kwargs.get("inplace") is True


def _settle_parts(dataflow: Dataflow, empty: Value, sharing: list[Value]) -> None:
    """Makes a tensor whose columns are all written to, part by part, the parts side by side.

    Args:
        dataflow: of a forward.
        empty: the tensor, without entries at first.
        sharing: all values that lie in its memory.
    """
    parts: dict[int, Value] = {}
    known, end, last = {empty}, empty.shape[-1] if empty.shape else 0, None
    readers = [
        n for n in dataflow.nodes if any(v in sharing for v in values_in((n.args, n.kwargs)))
    ]
    while readers and (found := _part_of(empty, readers[:2])) is not None:
        start, part = found
        known.update(readers[0].results + readers[1].results)
        parts[start], (_, last), readers = part, readers[:2], readers[2:]
    ends = {start + part.shape[-1] for start, part in parts.items()}
    whole = {0, *ends} == {end, *parts} and sum(p.shape[-1] for p in parts.values()) == end
    seen = known.union(*(n.results for n in readers))  # views of the whole
    if last is None or not whole or not seen.issuperset(sharing):
        return
    read = [v for n in readers for v in values_in((n.args, n.kwargs))]
    if any(v in known and v is not empty for v in (*read, *values_in(dataflow.result))):
        return
    copies = [n for n in dataflow.nodes if n.op == "copy_" and known.issuperset(n.results)]
    for node in copies:
        node.effect = ""
    ordered = [parts[start] for start in sorted(parts)]
    last.op, last.function, last.args, last.kwargs = "cat", torch.cat, (ordered, -1), {}
    last.results, empty.node = [empty], last
    empty.requires_grad = any(part.requires_grad for part in ordered)


def _part_of(empty: Value, nodes: list[Node]) -> tuple[int, Value] | None:
    """(the first column, what is copied there), if one node takes columns and the next copies."""
    if [n.op for n in nodes] != ["__getitem__", "copy_"] or nodes[0].place != nodes[1].place:
        return None
    (x, index), (view, *others) = nodes[0].args, nodes[1].args
    slices = type(index) is tuple and len(index) == 2 and index[0] is ... and index[1:]
    if x is not empty or [view] != nodes[0].results or len(others) != 1 or nodes[1].kwargs:
        return None
    (part,) = others
    if not slices or type(slices[0]) is not slice or not isinstance(part, Value):
        return None
    if _memory(part) == _memory(empty):
        return None
    start, _, step = slices[0].indices(empty.shape[-1])
    same = (part.shape, part.meta.dtype) == (view.shape, view.meta.dtype) and step == 1
    return (start, part) if same and nodes[1].effect == "writes in place by copy_" else None


def _settle(node: Node) -> None:
    node.effect = ""
    if node.op in _WITHOUT:
        node.op = _WITHOUT[node.op]
        node.function = getattr(Tensor, node.op)
    else:
        node.kwargs = {**node.kwargs, "inplace": False}

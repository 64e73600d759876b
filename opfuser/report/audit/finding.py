"""Operations in a trace: functions of torch, and formulas that are written out."""

from __future__ import annotations

import operator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from ...core.op_base.kinds import must_be_called
from ...op import BasicOperation, FusedOperation, FusibleOperation
from ...reading.dataflow import Dataflow, Node, Origin, Value, map_leaves
from ...reading.kept import KeptError
from ...reading.replay import undisturbed
from ...reading.torch_functions import name_of as name_in_torch
from ...reading.values import Values
from .formulas import Formula, formulas_of
from .tracing import CASTS, VIEWS, Trace, facts_of, is_in_place, item, name_of

_ORIGINS: dict[str, Origin] = {"placeholder": "input", "get_attr": "parameter"}


class Found(NamedTuple):
    """An operation of a model, by the nodes that compute it.

    Attributes:
        kind: as of :class:`.formulas.Formula`.
        nodes: in the order of the graph.
        output: the last of them.
        inputs: tensors that it is computed from, the main one first; no parameters.
        values: other operands by name: nodes of parameters, and numbers.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    output: fx.Node
    inputs: tuple[fx.Node, ...]
    values: dict[str, Any]

    @property
    def outputs(self) -> list[fx.Node]:
        """What others may read: of linear operations that were merged, several."""
        found: list[fx.Node] = self.values.get("outputs", [self.output])
        return found

    @property
    def launches(self) -> list[fx.Node]:
        """Its nodes without views."""
        return [node for node in self.nodes if node.meta.get("writes")]


@undisturbed()
def find(trace: Trace) -> list[Found]:
    """The operations of a graph, in its order. Of formulas that overlap, the largest is found.

    A node belongs to one of them at most.
    """
    finder = _Finder(trace.graph)
    found: list[Found] = []
    claimed: set[fx.Node] = set()
    for node in list(trace.graph.nodes)[::-1]:
        one = None if node in claimed else finder.found_at(node)
        if one is not None and claimed.isdisjoint(one.nodes):
            found.append(one)
            claimed.update(one.nodes)
    return sorted(found, key=lambda one: finder.order[one.output])


class _Finder:
    """Looks for operations in a graph, which it makes a dataflow of."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: n for n, node in enumerate(graph.nodes)}
        self.values: dict[fx.Node, Value] = {}
        self.calls: dict[fx.Node, Node] = {}
        flow = Dataflow()
        for node in graph.nodes:
            self._add(node)
        flow.nodes += self.calls.values()
        self.nodes = {value: node for node, value in self.values.items()}
        self.parameters = {str(n.target): n for n in self.values if n.op == "get_attr"}
        self.of_dtype = lru_cache(None)(lambda dtype: Values(flow, dtype))

    def _add(self, node: fx.Node) -> None:
        call, facts = None, facts_of(node)
        if node.target is item:
            call = self.calls[node.args[0]]  # type: ignore[index]
        elif node.op in ("call_function", "call_module"):
            call = self.calls[node] = self._call(node)
        if facts is not None:
            meta = torch.empty(facts.shape, dtype=facts.dtype, device="meta")
            value = Value(_ORIGINS.get(node.op, "node"), str(node.target), meta, call)
            self.values[node] = value
            if call is not None:
                call.results.append(value)

    def _call(self, node: fx.Node) -> Node:
        op, function, args = node.op, node.target, node.args
        if function is getattr:  # of a property
            op, args = str(args[1]), args[:1]
            function = operator.attrgetter(op)
        elif op == "call_function":
            # What writes to its first argument has its result from here on.
            op = name_of(node) if is_in_place(function) else name_in_torch(function)  # type: ignore[arg-type]
        args, kwargs = map_leaves(self._value_of, (args, node.kwargs))
        return Node(op, function, args, kwargs, "")  # type: ignore[arg-type]

    def _value_of(self, leaf: Any) -> Any:
        return self.values.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf

    def found_at(self, node: fx.Node) -> Found | None:
        """The operation whose result a node is."""
        if node.op == "call_module":
            return _called(node)
        value = self.values.get(node)
        if value is None or node.op != "call_function" or node.target is item:
            return None
        if name_of(node) == "cross_entropy":
            return _loss(node)
        values = self.of_dtype(value.meta.dtype)
        with suppress(KeptError):
            if values.peel(value) is value:
                found = (self._found(f, node, values) for f in formulas_of(values, value))
                one = next((one for one in found if one is not None), None)
                if one is not None and one.kind in ("layer_norm", "rms_norm"):
                    return _of_embedding(one, self.order) or one
                return one
        return None

    def _found(self, formula: Formula, node: fx.Node, values: Values) -> Found | None:
        inputs = tuple(self.nodes[v] for v in formula.inputs)
        operands = {
            name: self.parameters.get(given) if isinstance(given, str) else given
            for name, given in formula.operands.items()
        }
        nodes = _between(node, {*inputs, *(self.nodes[v] for v in formula.others)})
        if not any(n.meta["writes"] and name_of(n) not in CASTS for n in nodes - {node}):
            inputs = tuple(self._read(node, v, values) for v in formula.inputs)
            return Found(formula.kind, (node,), node, inputs, operands)
        output = node
        while len(output.users) == 1 and name_of(user := next(iter(output.users))) in CASTS:
            output = user
            nodes.add(output)
        nodes = _inside(nodes, output)
        if node not in nodes:
            return None
        ordered = tuple(sorted(nodes, key=self.order.__getitem__))
        return Found(formula.kind, ordered, output, inputs, operands)

    def _read(self, node: fx.Node, v: Value, values: Values) -> fx.Node:
        """The argument of a call that a value is equal to."""
        given = (n for n in node.all_input_nodes if n in self.values)
        return next((n for n in given if values.equals(self.values[n], v)), self.nodes[v])


def _between(node: fx.Node, ends: set[fx.Node]) -> set[fx.Node]:
    """The calls that lead from some nodes to one."""
    found: set[fx.Node] = set()
    at = [node]
    while at:
        n = at.pop()
        if n.op.startswith("call") and n not in ends and n not in found:
            found.add(n)
            at += n.all_input_nodes
    return found


def _inside(nodes: set[fx.Node], output: fx.Node) -> set[fx.Node]:
    """The nodes, without conversions that others read too; none if others read more."""
    while True:
        read = {n for n in nodes if n is not output and not set(n.users) <= nodes}
        if not read:
            return nodes
        if any(name_of(n) not in CASTS and n.meta.get("writes") for n in read):
            return set()
        nodes = nodes - read


def _of_embedding(norm: Found, order: dict[fx.Node, int]) -> Found | None:
    """A norm with the embeddings that it alone reads."""
    nodes, tables = set(norm.nodes), []
    at = [norm.inputs[0]]
    while at:
        node = at.pop()
        if not set(node.users) <= nodes or name_of(node) not in ("embedding", "add", "dropout"):
            continue
        nodes.add(node)
        if name_of(node) == "embedding":
            tables.append(node)
        at += [n for n in node.all_input_nodes if n not in nodes]
    if not tables:
        return None
    inputs = tuple(dict.fromkeys(n for n in tables[0].all_input_nodes if n.op != "get_attr"))
    ordered = tuple(sorted(nodes, key=order.get))  # type: ignore[arg-type]
    return Found("embedding_norm", ordered, norm.output, inputs, norm.values)


def _called(node: fx.Node) -> Found | None:
    """An operation of opfuser that is called outside of a Sequential, and could be in one."""
    module = node.meta.get("module")
    if not isinstance(module, FusibleOperation) or must_be_called(module):
        return None
    ops = module.basic_ops if isinstance(module, FusedOperation) else (module,)
    alone = not any(isinstance(op, BasicOperation) and op.num_extra_inputs for op in ops)
    if len(node.args) != 1 or facts_of(node) is None or not alone:
        return None
    x = node.args[0]
    assert isinstance(x, fx.Node)
    return Found(type(module).__name__, (node,), node, (x,), {"module": module})


def _loss(node: fx.Node) -> Found | None:
    """A cross entropy of rows, with conversions and views of the logits that nobody else reads."""
    names = ("input", "target", "weight", "", "", "", "reduction")
    given = {**dict(zip(names, node.args)), **node.kwargs}
    logits, target = given.get("input"), given.get("target")
    facts = facts_of(logits)
    if facts is None or len(facts.shape) != 2 or not isinstance(target, fx.Node):
        return None
    if given.get("weight") is not None:
        return None
    nodes = [node]
    while name_of(logits) in CASTS | VIEWS and len(logits.users) == 1:  # type: ignore[union-attr]
        nodes.insert(0, logits)  # type: ignore[arg-type]
        logits = logits.args[0]  # type: ignore[union-attr]
    before = facts_of(logits)
    if before is None or before.shape[-1:] != facts.shape[-1:]:
        return None
    values = {"reduction": given.get("reduction", "mean")}
    return Found("cross_entropy", tuple(nodes), node, (logits, target), values)  # type: ignore[arg-type]

"""Operations in an FX graph: functions of torch, and formulas that are written out."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...op import BasicOperation, FusedOperation, FusibleOperation
from ...op.kinds import must_be_called
from .formulas import (
    COMBINED,
    WRITTEN_OUT,
    Formula,
    Found,
    is_matrix,
    is_vector,
    matrix_operand,
)
from .patterns import CASTS, VIEWS, Binding, heads, is_altered, matches, uncast
from .tracing import Trace, facts_of, name_of

__all__ = ["find"]

_BY_HEAD = tuple((formula, heads(formula.pattern) or frozenset()) for formula in WRITTEN_OUT)


def find(trace: Trace) -> list[Found]:
    """The operations of a graph, in its order. Of formulas that overlap, the largest is found.

    A node belongs to one of them at most.
    """
    order = {node: n for n, node in enumerate(trace.graph.nodes)}
    claimed: dict[fx.Node, Found] = {}

    def claim(found: Found) -> None:
        for node in found.nodes:
            claimed[node] = found
            node.meta.pop("lifted", None)
        found.output.meta["lifted"] = found

    backwards = list(trace.graph.nodes)[::-1]
    for node in backwards:
        if node not in claimed:
            found = _written_out(node, order)
            if found is not None and not any(n in claimed for n in found.nodes):
                claim(found)
    for node in backwards[::-1]:
        direct = None if node in claimed else _called(node) or _direct(node)
        if direct is not None:
            claim(direct)
    for node in backwards:
        combined = _combined(node, order)
        if combined is not None:
            claim(combined)
    unique = {id(found): found for found in claimed.values()}
    live = [f for f in unique.values() if f.output.meta.get("lifted") is f]
    return sorted(live, key=lambda found: order[found.output])


def _written_out(node: fx.Node, order: dict[fx.Node, int]) -> Found | None:
    if node.op != "call_function":
        return None
    name = name_of(node)
    for formula, names in _BY_HEAD:
        for binding in matches(formula.pattern, node) if name in names else ():
            found = _found(formula, node, binding, order)
            if found is not None and len(found.launches) > 1:
                return found
    return None


def _found(
    formula: Formula, node: fx.Node, binding: Binding, order: dict[fx.Node, int]
) -> Found | None:
    inputs = [binding.values[name] for name in formula.inputs if name in binding.values]
    shapes = {facts.shape for n in inputs if (facts := facts_of(n)) is not None}
    if formula.same_shape and len(shapes) != 1:
        return None
    nodes = set(binding.nodes) - set(inputs)
    output = node
    while len(output.users) == 1 and uncast(next(iter(output.users)))[0] is output:
        output = next(iter(output.users))
        nodes.add(output)
    nodes = _inside(nodes, output)
    if node not in nodes:
        return None
    values = {**binding.values, **dict(formula.numbers)}
    return Found(formula.kind, tuple(sorted(nodes, key=order.get)), output, tuple(inputs), values)  # type: ignore[arg-type]


def _inside(nodes: set[fx.Node], output: fx.Node) -> set[fx.Node]:
    """The nodes, without conversions that others read too; none if others read more."""
    while True:
        read = {n for n in nodes if n is not output and not set(n.users) <= nodes}
        if not read:
            return nodes
        if any(uncast(n)[0] is n and n.meta.get("writes") for n in read):
            return set()
        nodes = nodes - read


def _combined(node: fx.Node, order: dict[fx.Node, int]) -> Found | None:
    for formula in COMBINED:
        for binding in matches(formula.pattern, node):
            parts = [binding.values[n] for n in ("act", "norm") if n in binding.values]
            part: Found = parts[0].meta["lifted"]
            if formula.kind == "embedding_norm":
                return _of_embedding(part, order)
            if part.output is not node and not set(part.output.users) <= binding.nodes:
                continue
            nodes = binding.nodes.union(part.nodes)
            values = {n: v for n, v in binding.values.items() if v is not part.output}
            whole = Formula(formula.kind, formula.pattern, ("x", *formula.inputs[1:]))
            shape = facts_of(part.output), facts_of(binding.values.get("up"))
            if formula.same_shape and (shape[1] is None or shape[0].shape != shape[1].shape):  # type: ignore[union-attr]
                continue
            joined = Binding({**part.values, **values, "x": part.inputs[0]}, nodes)
            return _found(whole, node, joined, order)
    return None


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


_ACTIVATIONS = frozenset({"silu", "relu", "sigmoid", "tanh", "softplus"})
_NORM_OPERANDS = {"layer_norm": ("weight", "bias", "eps"), "rms_norm": ("weight", "eps")}


def _direct(node: fx.Node) -> Found | None:
    """What one function of torch computes, if an operation of opfuser is its like."""
    name = "" if is_altered(node) else name_of(node)
    args: list[Any] = list(node.args)

    def given(n: int, key: str, default: Any = None) -> Any:
        return args[n] if n < len(args) else node.kwargs.get(key, default)

    def made(kind: str, inputs: tuple[Any, ...], **values: Any) -> Found | None:
        tensors = tuple(n for n in inputs if isinstance(n, fx.Node))
        return Found(kind, (node,), node, tensors, values) if len(tensors) == len(inputs) else None

    if name == "linear" and is_matrix(given(1, "weight")):
        return made(
            "linear", (given(0, "input"),), weight=given(1, "weight"), bias=given(2, "bias")
        )
    if name == "addmm" and is_matrix(given(2, "mat2")):
        return made("linear", (given(1, "mat1"),), weight=given(2, "mat2"), bias=given(0, "input"))
    if name == "matmul" and len(args) == 2:
        for binding in matches(matrix_operand, args[1]):
            return made("linear", (args[0],), weight=binding.values["weight"], bias=None)
    if name in _NORM_OPERANDS:
        names = enumerate(_NORM_OPERANDS[name], 2)
        return made(name, (given(0, "input"),), **{key: given(n, key) for n, key in names})
    if name in _ACTIVATIONS:
        return made(name, (given(0, "input"),))
    if name == "gelu":
        tanh = given(1, "approximate", "none") == "tanh"
        return made("gelu_tanh" if tanh else "gelu", (given(0, "input"),))
    if name == "dropout" and given(2, "training", True) and given(1, "p", 0.5):
        return made("dropout", (given(0, "input"),), p=given(1, "p", 0.5))
    if name == "embedding" and is_matrix(given(1, "weight")):
        return made("embedding", (given(0, "input"),), weight=given(1, "weight"))
    if name == "cross_entropy" and given(2, "weight") is None:
        return _loss(node, given(0, "input"), given(1, "target"), given(6, "reduction", "mean"))
    if name == "add" and len(args) == 2 and any(is_vector(n) for n in args):
        weight, x = args if is_vector(args[0]) else args[::-1]
        return made("bias", (x,), weight=weight)
    if name == "add":
        terms = [n for n in args if isinstance(n, fx.Node) and n.op != "get_attr"]
        shapes = {getattr(facts_of(n), "shape", None) for n in terms}
        return made("add", tuple(terms)) if len(terms) == 2 and len(shapes) == 1 else None
    return None


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


def _loss(node: fx.Node, logits: Any, target: Any, reduction: str) -> Found | None:
    """A cross entropy of rows, with conversions and views of the logits that nobody else reads."""
    facts = facts_of(logits)
    if facts is None or len(facts.shape) != 2 or not isinstance(target, fx.Node):
        return None
    nodes = [node]
    while name_of(logits) in CASTS | VIEWS and len(logits.users) == 1:
        nodes.insert(0, logits)
        logits = logits.args[0]
    before = facts_of(logits)
    if before is None or before.shape[-1:] != facts.shape[-1:]:
        return None
    values = {"reduction": reduction}
    return Found("cross_entropy", tuple(nodes), node, (logits, target), values)

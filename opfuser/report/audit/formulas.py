"""Operations in an FX graph: functions of torch, and formulas that are written out."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from .patterns import (
    Binding,
    Either,
    Lifted,
    Number,
    Op,
    Pattern,
    Product,
    Through,
    Var,
    heads,
    is_parameter,
    matches,
    uncast,
)
from .tracing import Trace, facts_of, name_of

__all__ = ["Found", "find"]


class Found(NamedTuple):
    """An operation of a model, by the nodes that compute it.

    Attributes:
        kind: what is computed: "rms_norm", "linear", "swiglu" and so on.
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


class Formula(NamedTuple):
    """A way to write an operation.

    Attributes:
        kind: as of :class:`Found`.
        pattern: of its output.
        inputs: names of what the pattern binds, the main one first.
        same_shape: whether all inputs must have one shape.
        numbers: what else is known of the operation.
    """

    kind: str
    pattern: Pattern
    inputs: tuple[str, ...] = ("x",)
    same_shape: bool = False
    numbers: tuple[tuple[str, Any], ...] = ()


_VECTOR, _MATRIX = is_parameter(1), is_parameter(2)
X, W, B = Var("x"), Var("weight", _VECTOR), Var("bias", _VECTOR)
EPS = Number(name="eps")


def _plus(*args: Any) -> Op:
    return Op("add", args)


def _times(*factors: Any, number: float = 1.0) -> Product:
    return Product(factors, number)


def _squared(x: Any) -> Either:
    return Either((Op("pow", (x, Number(2))), Op("square", (x,)), Op("mul", (x, x))))


def _over_root(x: Any, square: Any) -> Either:
    """The quotient of x and the root of ``square + eps``."""
    inside = _plus(square, EPS)
    inverse = Either(
        (Op("rsqrt", (inside,)), Op("pow", (inside, Number(-0.5))), Op("reciprocal", (
            Op("sqrt", (inside,)),)))
    )  # fmt: skip
    return Either((_times(x, inverse), Op("div", (x, Op("sqrt", (inside,))))))


def _weighted(x: Any, square: Any) -> Either:
    """The same times a weight, however the three are associated."""
    inside = _plus(square, EPS)
    inverse = Either((Op("rsqrt", (inside,)), Op("pow", (inside, Number(-0.5)))))
    ratio = Op("div", (x, Op("sqrt", (inside,))))
    return Either((_times(W, x, inverse), _times(W, ratio)))


def _biased(node: fx.Node) -> bool:
    """Whether a variance divides by the number of values less one."""
    flags = [*node.args, *node.kwargs.values()]
    return not (node.kwargs.get("correction") == 0 or any(flag is False for flag in flags))


_MEAN_SQUARE = Op("mean", (_squared(X),))
_CENTRED = Op("sub", (X, Op("mean", (X,))))
_VARIANCE = Either(
    (Op("var", (X,), lambda node: not _biased(node)), Op("mean", (_squared(_CENTRED),)))
)
_ONE_PLUS_WEIGHT = _plus(Number(1), W)
_SIGMOID = Op("sigmoid", (X,))
_CUBE = Either((Op("pow", (X, Number(3))), _times(X, X, X)))
_INSIDE_TANH = Either((
    _times(_plus(X, Either((_times(Op("pow", (X, Number(3))), number=0.044715),
                            _times(X, X, X, number=0.044715)))), number=0.7978845608),
    _times(X, _plus(Number(1), _times(X, X, number=0.044715)), number=0.7978845608),
))  # fmt: skip
_MATRIX_OPERAND = Through("t transpose permute T mT", Var("weight", _MATRIX))
_SCORES = Either((
    Op("matmul einsum", (Var("q"), Var("k"))),
    Op("baddbmm", (Var("mask"), Var("q"), Var("k"))),
))  # fmt: skip
_HALF = Op("getitem item narrow", (Through("chunk split", X),))
_ROTATED = Op("cat", (Op("neg", (_HALF,)), _HALF))


def _is_lifted(*kinds: str) -> Any:
    def accepts(node: fx.Node) -> bool:
        found: Found | None = node.meta.get("lifted")
        return found is not None and found.kind in kinds

    return accepts


def _is_unweighted_norm(kind: str) -> Any:
    def accepts(node: fx.Node) -> bool:
        found: Found | None = node.meta.get("lifted")
        return found is not None and found.kind == kind and found.values.get("weight") is None

    return accepts


def _is_tensor(node: fx.Node) -> bool:
    return node.op != "get_attr" and facts_of(node) is not None


# What is written out, the larger formula before one that it contains.
WRITTEN_OUT = (
    Formula(
        "attention",
        Op("matmul einsum", (
            Through("dropout softmax_backward", Op("softmax", (
                Through("add sub mul div masked_fill where clamp float", _SCORES),))),
            Var("v"),
        )),
        ("q", "k", "v"),
    ),
    Formula(
        "rotary_embedding",
        _plus(_times(X, Var("cos")), _times(_ROTATED, Var("sin"))),
        ("x", "cos", "sin"),
    ),
    Formula(
        "rotary_embedding",
        Op("view_as_real", (Op("mul", (Op("view_as_complex", (X,)), Var("turns"))),)),
        ("x", "turns"),
    ),
    Formula("layer_norm", Op("add", (_weighted(_CENTRED, _VARIANCE), B))),
    Formula("layer_norm", _weighted(_CENTRED, _VARIANCE)),
    Formula("layer_norm", _over_root(_CENTRED, _VARIANCE)),
    Formula("rms_norm", _weighted(X, _MEAN_SQUARE)),
    Formula(
        "rms_norm",
        _times(X, Either((
            Op("rsqrt", (_plus(_MEAN_SQUARE, EPS),)),
            Op("pow", (_plus(_MEAN_SQUARE, EPS), Number(-0.5))),
        )), _ONE_PLUS_WEIGHT),
        numbers=(("zero_centered_gamma", True),),
    ),
    Formula("rms_norm", _over_root(X, _MEAN_SQUARE)),
    Formula("swiglu", _times(X, _SIGMOID, Var("up", _is_tensor)), ("x", "up"), same_shape=True),
    Formula("quick_gelu", _times(X, Op("sigmoid", (_times(X, number=1.702),)))),
    Formula("silu", _times(X, _SIGMOID)),
    Formula("silu", Op("div", (X, _plus(Number(1), Op("exp", (Op("neg", (X,)),)))))),
    Formula("gelu_tanh", _times(X, _plus(Number(1), Op("tanh", (_INSIDE_TANH,))), number=0.5)),
    Formula(
        "gelu",
        _times(X, _plus(Number(1), Op("erf", (_times(X, number=0.70710678),))), number=0.5),
    ),
    Formula(
        "linear",
        _plus(
            Either((
                Op("matmul", (X, _MATRIX_OPERAND)),
                Op("linear", (X, Var("weight", _MATRIX))),
            )),
            B,
        ),
    ),
)  # fmt: skip
_BY_HEAD = tuple((formula, heads(formula.pattern) or frozenset()) for formula in WRITTEN_OUT)
_ACTIVATION = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu": "reglu",
               "sigmoid": "glu", "quick_gelu": "qgeglu"}  # fmt: skip
_SHIFTED = _plus(Number(1), Var("scale", _is_tensor))


def _modulated(kind: str) -> Either:
    """(1 + scale) norm(x) + shift, with or without the 1 and the shift."""
    norm = Lifted("norm", _is_unweighted_norm(kind))
    scaled, whole = _times(norm, Var("scale", _is_tensor)), _times(norm, _SHIFTED)
    shift = Var("shift", _is_tensor)
    return Either((_plus(whole, shift), _plus(scaled, shift), whole))


# What is written with operations that were found before.
COMBINED = (
    *(
        Formula(f"adaptive_{kind}", _modulated(kind), ("norm", "scale", "shift"))
        for kind in ("layer_norm", "rms_norm")
    ),
    *(
        Formula(
            gated,
            _times(Lifted("act", _is_lifted(plain)), Var("up", _is_tensor)),
            ("act", "up"),
            same_shape=True,
        )
        for plain, gated in _ACTIVATION.items()
    ),
    Formula("squared_relu", _squared(Lifted("act", _is_lifted("relu"))), ("act",)),
    Formula(
        "embedding_norm",
        Lifted("norm", _is_lifted("layer_norm", "rms_norm")),
        ("norm",),
    ),
)


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
        direct = None if node in claimed else _direct(node)
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
    name = name_of(node)
    args: list[Any] = list(node.args)

    def given(n: int, key: str, default: Any = None) -> Any:
        return args[n] if n < len(args) else node.kwargs.get(key, default)

    def made(kind: str, inputs: tuple[Any, ...], **values: Any) -> Found | None:
        tensors = tuple(n for n in inputs if isinstance(n, fx.Node))
        return Found(kind, (node,), node, tensors, values) if len(tensors) == len(inputs) else None

    if name == "linear" and _is_weight(given(1, "weight")):
        return made(
            "linear", (given(0, "input"),), weight=given(1, "weight"), bias=given(2, "bias")
        )
    if name == "addmm" and _is_weight(given(2, "mat2")):
        return made("linear", (given(1, "mat1"),), weight=given(2, "mat2"), bias=given(0, "input"))
    if name == "matmul" and len(args) == 2:
        for binding in matches(_MATRIX_OPERAND, args[1]):
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
    if name == "embedding" and _is_weight(given(1, "weight")):
        return made("embedding", (given(0, "input"),), weight=given(1, "weight"))
    if name == "cross_entropy":
        return made("cross_entropy", (given(0, "input"), given(1, "target")))
    if name == "add" and len(args) == 2 and any(_is_vector(n) for n in args):
        weight, x = args if _is_vector(args[0]) else args[::-1]
        return made("bias", (x,), weight=weight)
    if name == "add" and not node.kwargs.get("alpha"):
        terms = [n for n in args if isinstance(n, fx.Node) and n.op != "get_attr"]
        shapes = {getattr(facts_of(n), "shape", None) for n in terms}
        return made("add", tuple(terms)) if len(terms) == 2 and len(shapes) == 1 else None
    return None


def _is_weight(node: Any) -> bool:
    return isinstance(node, fx.Node) and _MATRIX(node)


def _is_vector(node: Any) -> bool:
    return isinstance(node, fx.Node) and _VECTOR(node)

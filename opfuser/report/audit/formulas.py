"""Formulas: how operations are written out with functions of torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from .patterns import (
    Either,
    Lifted,
    Number,
    Op,
    Pattern,
    Product,
    Through,
    Var,
    is_last,
    is_parameter,
)
from .tracing import facts_of

__all__ = [
    "COMBINED",
    "WRITTEN_OUT",
    "Formula",
    "Found",
    "is_matrix",
    "is_vector",
    "matrix_operand",
]


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


is_vector, is_matrix = is_parameter(1), is_parameter(2)
X, W, B = Var("x"), Var("weight", is_vector), Var("bias", is_vector)
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


def _is_uncorrected(node: fx.Node) -> bool:
    """Whether a variance along the last dimensions is divided by the number of values itself."""
    flags = [*node.args, *node.kwargs.values()]
    uncorrected = node.kwargs.get("correction") == 0 or any(flag is False for flag in flags)
    return uncorrected and is_last(node)


_MEAN_SQUARE = Op("mean", (_squared(X),), is_last)
_CENTRED = Op("sub", (X, Op("mean", (X,), is_last)))
_VARIANCE = Either((Op("var", (X,), _is_uncorrected), Op("mean", (_squared(_CENTRED),), is_last)))
_ONE_PLUS_WEIGHT = _plus(Number(1), W)
_SIGMOID = Op("sigmoid", (X,))
_INSIDE_TANH = Either((
    _times(_plus(X, Either((_times(Op("pow", (X, Number(3))), number=0.044715),
                            _times(X, X, X, number=0.044715)))), number=0.7978845608),
    _times(X, _plus(Number(1), _times(X, X, number=0.044715)), number=0.7978845608),
))  # fmt: skip
matrix_operand = Through("t transpose permute T mT", Var("weight", is_matrix))
_SCORES = Either((
    Op("matmul einsum", (Var("q"), Var("k"))),
    Op("baddbmm", (Var("mask"), Var("q"), Var("k"))),
))  # fmt: skip
_HALF = Op("getitem item narrow", (Through("chunk split", X),))
_ROTATED = Op("cat", (Op("neg", (_HALF,)), _HALF), is_last)


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
                Through("add sub mul div masked_fill where clamp float", _SCORES),), is_last)),
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
                Op("matmul", (X, matrix_operand)),
                Op("linear", (X, Var("weight", is_matrix))),
            )),
            B,
        ),
    ),
)  # fmt: skip
_ACTIVATION = {"silu": "swiglu", "gelu": "geglu_exact", "gelu_tanh": "geglu", "relu": "reglu",
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

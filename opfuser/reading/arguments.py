"""Calls of torch in one form: a name for each operation, arguments in order, defaults filled in."""

from __future__ import annotations

from typing import Any, NamedTuple

from .dataflow import Node, Value

__all__ = ["CASTS", "Term", "is_number", "term_of"]


class Term(NamedTuple):
    """An operation and its arguments; two calls that compute the same way have equal terms."""

    op: str
    args: tuple[Any, ...]


CASTS = frozenset("to float double half bfloat16 type_as".split())
_COPIES = frozenset("contiguous clone".split())
_SAME = {
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "negative": "neg",
    "__rsub__": "rsub",
    "__rdiv__": "rdiv",
    "mm": "matmul",
    "bmm": "matmul",
    "_grouped_mm": "grouped_mm",
    "__matmul__": "matmul",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "clip": "clamp",
    "view_as": "reshape_as",
    "view": "reshape",
}
# Names of the arguments after the first, with their defaults; ... has none.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "add": {"other": ..., "alpha": 1},
    "sub": {"other": ..., "alpha": 1},
    "rsub": {"other": ...},
    "rdiv": {"other": ...},
    "mul": {"other": ...},
    "div": {"other": ..., "rounding_mode": None},
    "neg": {},
    "pow": {"exponent": ...},
    "square": {},
    "sqrt": {},
    "rsqrt": {},
    "reciprocal": {},
    "mean": {"dim": None, "keepdim": False, "dtype": None},
    "max": {"dim": None, "keepdim": False},
    "cat": {"dim": 0},
    "var": {"dim": None, "unbiased": None, "keepdim": False, "correction": None},
    "silu": {"inplace": False},
    "relu": {"inplace": False},
    "gelu": {"approximate": "none"},
    "sigmoid": {},
    "tanh": {},
    "erf": {},
    "clamp": {"min": None, "max": None},
    "softplus": {"beta": 1.0, "threshold": 20.0},
    "glu": {"dim": -1},
    "dropout": {"p": 0.5, "training": True, "inplace": False},
    "softmax": {"dim": None, "dtype": None},
    "sum": {"dim": None, "keepdim": False, "dtype": None},
    "chunk": {"chunks": ..., "dim": 0},
    "cumsum": {"dim": ..., "dtype": None},
    "histc": {"bins": 100, "min": 0, "max": 0},
    "sort": {"dim": -1, "descending": False, "stable": None},
    "topk": {"k": ..., "dim": -1, "largest": True, "sorted": True},
    "one_hot": {"num_classes": -1},
    "repeat_interleave": {"repeats": ..., "dim": None, "output_size": None},
    "index_add": {"dim": ..., "index": ..., "source": ..., "alpha": 1},
    "grouped_mm": {"mat_b": ..., "offs": None, "bias": None, "out_dtype": None},
    "arange": {"dtype": None, "device": None},
    "zeros_like": {"dtype": None, "device": None},
    "empty_like": {"dtype": None, "device": None},
    "matmul": {"other": ...},
    "linear": {"weight": ..., "bias": None},
    "addmm": {"mat1": ..., "mat2": ..., "beta": 1, "alpha": 1},
    "embedding": {
        "weight": ...,
        "padding_idx": None,
        "max_norm": None,
        "norm_type": 2.0,
        "scale_grad_by_freq": False,
        "sparse": False,
    },
    "layer_norm": {"normalized_shape": ..., "weight": None, "bias": None, "eps": 1e-5},
    "rms_norm": {"normalized_shape": ..., "weight": None, "eps": None},
    "scaled_dot_product_attention": {
        "key": ...,
        "value": ...,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    },
}
# How many warnings' frames a function goes up, and similar.
_WITHOUT_EFFECT = frozenset({"_stacklevel"})
_NORMALISED = frozenset({"mean", "var", "softmax", "glu"})


def term_of(node: Node) -> Term:
    """The term of a call. Its name is "" where the call has unusual arguments.

    Without a signature here, the arguments are those of the call, unless it has keywords.
    """
    op = _SAME.get(node.op, node.op)
    if op in CASTS or op in _COPIES:
        return Term("copy" if op in _COPIES else "cast", node.args[:1])
    names = _ARGUMENTS.get(op)
    if names is None:
        return Term(op, node.args) if not node.kwargs else Term(op, ())
    args = _in_order(node, names)
    if args is None:
        return Term("", ())
    return _canonical(op, args)


def _in_order(node: Node, names: dict[str, Any]) -> list[Any] | None:
    given = {k: v for k, v in node.kwargs.items() if k not in _WITHOUT_EFFECT}
    first = node.args[:1] or (given.pop("input", None),)
    if len(node.args) - 1 > len(names) or not set(given) <= set(names):
        return None
    filled = {**names, **dict(zip(names, node.args[1:])), **given}
    if ... in filled.values():
        return None
    return [*first, *filled.values()]


def _canonical(op: str, args: list[Any]) -> Term:
    x, *rest = args
    if not isinstance(x, Value) and op in ("add", "mul") and isinstance(rest[0], Value):
        x, rest[0] = rest[0], x
    if op == "pow" and not isinstance(rest[0], Value):
        named = {2: "square", -0.5: "rsqrt", 0.5: "sqrt", -1: "reciprocal"}.get(rest[0])
        return Term(named, (x,)) if named else Term(op, (x, *rest))
    if op == "mul" and rest[0] is x:
        return Term("square", (x,))
    if op in ("silu", "relu", "dropout"):
        return Term("" if rest[-1] else op, (x, *rest[:-1]))
    if op == "div":
        return Term("" if rest[1] else op, (x, rest[0]))
    if op == "rdiv" and is_number(rest[0]):
        return Term("reciprocal", (x,)) if rest[0] == 1 else Term(op, (x, *rest))
    if op == "rsub":
        return Term(op, (x, *rest))
    if op in ("add", "sub"):
        return Term(op if rest[1] == 1 else "", (x, rest[0]))
    if op == "addmm":
        return Term(op if rest[2] == rest[3] == 1 else "", (x, *rest[:2]))
    if op in _NORMALISED:
        return _over_dimension(op, x, rest)
    return Term(op, (x, *rest))


def _over_dimension(op: str, x: Any, rest: list[Any]) -> Term:
    """With the dimension counted from the end, and the divisor of a variance as a correction."""
    dim = rest[0]
    if isinstance(dim, (tuple, list)):
        dim = dim[0] if len(dim) == 1 else None
    if not isinstance(x, Value) or not isinstance(dim, int):
        return Term("", ())
    dim = dim - len(x.shape) if dim >= 0 else dim
    if op == "softmax":
        return Term(op, (x, dim))
    if op != "var":
        return Term(op, (x, dim, *rest[1:2]))
    unbiased, keepdim, correction = rest[1:]
    if unbiased is not None and correction is not None:
        return Term("", ())
    default = 0 if unbiased is False else 1
    return Term(op, (x, dim, keepdim, default if correction is None else correction))


def is_number(x: Any) -> bool:
    """Whether it is a number of Python: a constant of the forward."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)

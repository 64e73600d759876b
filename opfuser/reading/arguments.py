"""Calls of torch in one form: a name for each operation, arguments in order, defaults filled in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..counterparts import ACTIVATIONS
from .dataflow import Node, Value


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
    "greater": "gt",
    "__gt__": "gt",
    "__eq__": "eq",
    "__floordiv__": "floor_divide",
    "view_as": "reshape_as",
    "view": "reshape",
}
# What comes after a star has to have its default, and is left out.
_OF_TORCH = " ".join(name for name, row in ACTIVATIONS.items() if row.torch is not None)
_SIGNATURES = f"""
{_OF_TORCH}: input, *, inplace=False
neg square sqrt rsqrt reciprocal erf: input
mul matmul rsub rdiv: input, other
add sub: input, other, *, alpha=1
div: input, other, *, rounding_mode=None
pow: input, exponent
clamp: input, min=None, max=None
gelu: input, approximate="none"
softplus: input, beta=1.0, threshold=20.0
glu: input, dim=-1
softmax: input, dim=None, dtype=None
dropout: input, p=0.5, training=True, *, inplace=False
mean: input, dim=None, keepdim=False, dtype=None
var: input, dim=None, unbiased=None, keepdim=False, correction=None
max: input, dim=None, keepdim=False
sum: input, dim=None, keepdim=False, dtype=None
cumsum: input, dim, dtype=None
histc: input, bins=100, min=0, max=0
sort: input, dim=-1, descending=False, stable=None
topk: input, k, dim=-1, largest=True, sorted=True
one_hot: input, num_classes=-1
cat: input, dim=0
chunk: input, chunks, dim=0
repeat_interleave: input, repeats, dim=None, output_size=None
index_add: input, dim, index, source, alpha=1
arange zeros_like empty_like: input, dtype=None, device=None
grouped_mm: input, mat_b, offs=None, bias=None, out_dtype=None
addmm: input, mat1, mat2, *, beta=1, alpha=1
baddbmm: input, batch1, batch2, beta=1, alpha=1
linear: input, weight, bias=None
embedding: input, weight, padding_idx=None, max_norm=None, norm_type=2.0, \
scale_grad_by_freq=False, sparse=False
layer_norm: input, normalized_shape, weight=None, bias=None, eps=1e-5
rms_norm: input, normalized_shape, weight=None, eps=None
scaled_dot_product_attention: query, key, value, attn_mask=None, dropout_p=0.0, \
is_causal=False, scale=None, enable_gqa=False
"""


def _arguments_of(signature: str) -> Callable[..., tuple[Any, ...] | None]:
    """A function of a call's arguments that returns them in order, or None for unusual ones."""
    taken, _, fixed = signature.partition(", *, ")
    names = ", ".join(part.partition("=")[0] for part in taken.split(", "))
    usual = fixed.replace("=", " == ").replace(", ", " and ") or "True"
    # Of the signatures above alone.
    return eval(f"lambda {signature}: ({names},) if {usual} else None")  # type: ignore[no-any-return]


_IN_ORDER = {
    op: _arguments_of(signature)
    for ops, _, signature in (line.partition(": ") for line in _SIGNATURES.strip().splitlines())
    for op in ops.split()
}


def term_of(node: Node) -> Term:
    """The term of a call. Its name is "" where the call has unusual arguments.

    Without a signature here, the arguments are those of the call, unless it has keywords.
    """
    op = _SAME.get(node.op, node.op)
    if op in CASTS or op in _COPIES:
        return Term("copy" if op in _COPIES else "cast", node.args[:1])
    in_order = _IN_ORDER.get(op)
    if in_order is None:
        return Term(op, node.args if not node.kwargs else ())
    # How many warnings' frames a function goes up is no part of what it computes.
    given = {name: value for name, value in node.kwargs.items() if name != "_stacklevel"}
    try:
        args = in_order(*node.args, **given)
    except TypeError:  # of arguments that the signature does not have
        args = None
    return _canonical(op, *args) if args else Term("", ())


def _canonical(op: str, x: Any, *rest: Any) -> Term:
    """One term for what has several names, and dimensions counted from the end."""
    if op in ("mean", "var", "softmax", "glu"):
        return _along(op, x, *rest)
    if op in ("add", "mul") and not isinstance(x, Value) and isinstance(rest[0], Value):
        return Term(op, (rest[0], x))
    if op == "mul" and rest[0] is x:
        return Term("square", (x,))
    named = None
    if op in ("pow", "rdiv") and is_number(rest[0]):
        powers = {2: "square", -0.5: "rsqrt", 0.5: "sqrt", -1: "reciprocal"}
        named = powers.get(rest[0]) if op == "pow" else {1: "reciprocal"}.get(rest[0])
    return Term(named, (x,)) if named else Term(op, (x, *rest))


def _along(op: str, x: Any, dim: Any, *rest: Any) -> Term:
    """The term of what is computed along one dimension; the divisor of a variance is a correction.

    The dtypes of results, not those that were asked for, say what is rounded.
    """
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(x, Value) or not isinstance(dim, int):
        return Term("", ())
    dim = dim - len(x.shape) if dim >= 0 else dim
    if op != "var":
        return Term(op, (x, dim, *rest[:1]) if op == "mean" else (x, dim))
    unbiased, keepdim, correction = rest
    if unbiased is not None and correction is not None:
        return Term("", ())
    default = 0 if unbiased is False else 1
    return Term(op, (x, dim, keepdim, default if correction is None else correction))


def is_number(x: Any) -> bool:
    """Whether it is a number of Python: a constant of the forward."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)

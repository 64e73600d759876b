"""Recorded nodes, computed again on numbers: where the entries of a tensor come from.

Layouts and rotary positions are polynomials of their inputs: what is equal at random points in fp64
is equal everywhere. So no order of views, splits and transpositions needs a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import torch_internals as internals
from .arguments import CASTS, is_number
from .dataflow import Node, Value, map_leaves, values_in
from .kept import KeptError
from .values import Values, computed

_LAYOUT = frozenset(
    """view reshape transpose permute chunk split unbind __getitem__ squeeze unsqueeze flatten
    unflatten expand expand_as narrow tensor_split cat concat stack mT T t repeat repeat_interleave
    swapaxes swapdims movedim select contiguous clone view_as reshape_as""".split()
)
_COMPLEX = frozenset({"view_as_complex", "view_as_real"})
_ARITHMETIC = frozenset("add sub mul neg rsub __rsub__ multiply subtract negative".split())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Computes on the CPU, whatever modes and default device the caller has set."""
    with internals.without_modes(), internals.DisableTorchFunction(), torch.no_grad():
        yield


def is_layout(values: Values, v: Value) -> bool:
    """Whether its entries are those of other tensors, in another order."""
    if v.node is None:
        return False
    return v.node.op in _LAYOUT or (v.node.op in CASTS and values.peel(v) is not v)


def _is_polynomial(values: Values, v: Value) -> bool:
    node = v.node
    if node is None or is_layout(values, v):
        return node is not None
    if node.op == "div":
        return not node.kwargs and is_number(node.args[1])
    return node.op in _ARITHMETIC or node.op in _COMPLEX


def leaves_of(values: Values, v: Value, is_leaf: Callable[[Value], bool]) -> list[Value]:
    """The values that a value is a polynomial of; ``is_leaf`` says where else to stop."""
    return _leaves(v, lambda at: _is_polynomial(values, at) and not is_leaf(at))


def source_of(values: Values, v: Value) -> Value | None:
    """The value whose entries are those of a value, in another order; None if it has several."""
    leaves = _leaves(v, lambda at: is_layout(values, at))
    return leaves[0] if len(leaves) == 1 else None


def columns_of(values: Values, v: Value) -> tuple[Value, Tensor] | None:
    """(a value, which of its columns each row has), if rows are columns of the rows of another.

    It is the first value that is so, of those that the entries have passed.
    """
    found, source = None, v
    while source.node is not None and is_layout(values, source) and v.shape and v.meta.numel():
        inner = list(values_in((source.node.args, source.node.kwargs)))
        if len(inner) != 1 or not inner[0].shape:
            break
        (source,) = inner
        places, width = origin_of(v, source).reshape(-1, v.shape[-1]), source.shape[-1]
        rows = width * torch.arange(len(places), device="cpu")[:, None]
        if width * len(rows) == source.meta.numel() and torch.equal(places, places[:1] + rows):
            found = source, places[0]
    return found


def _leaves(v: Value, is_followed: Callable[[Value], bool]) -> list[Value]:
    found: dict[Value, None] = {}
    seen: set[Value] = set()

    def visit(at: Value) -> None:
        if at in seen:
            return
        seen.add(at)
        if at.node is None or not is_followed(at):
            found[at] = None
            return
        for inner in values_in((at.node.args, at.node.kwargs)):
            visit(inner)

    visit(v)
    return list(found)


def evaluate(value: Value, known: dict[Value, Tensor]) -> Tensor:
    """The value in fp64, for those of its leaves; ``known`` gets the values on the way, too.

    Raises:
        KeptError: a node has arguments with which it does not compute so.
    """
    found = known.get(value)
    if found is not None:
        return found
    node = value.node
    if node is None:
        raise KeptError(f"computes with {value.name}")

    def leaf(x: Any) -> Any:
        return evaluate(x, known) if isinstance(x, Value) else x

    args, kwargs = map_leaves(leaf, (node.args, node.kwargs))
    try:
        known.update(zip(node.results, _called(node, args, kwargs)))
    except (TypeError, RuntimeError, IndexError, ValueError) as error:
        raise KeptError(f"{computed(value)} in an unusual way ({error})") from None
    return known[value]


def _called(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    if node.op in CASTS:
        return (args[0],)
    # Strides differ from those of the trace.
    function = Tensor.reshape if node.op == "view" else node.function
    out = function(*args, **kwargs)
    return (out,) if isinstance(out, Tensor) else tuple(out)


def indices_like(value: Value) -> Tensor:
    """0, 1, 2, ... in its shape: the places of its entries."""
    numel = value.meta.numel()
    return torch.arange(numel, dtype=torch.float64, device="cpu").view(value.shape)


def random_like(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of a generator of the reader's own: the caller's are not drawn from."""
    return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)


def origin_of(v: Value, source: Value) -> Tensor:
    """For each entry of a value, its place in ``source``, whose entries it has in another order."""
    return evaluate(v, {source: indices_like(source)}).long()

"""What functions of torch decide by sizes, noted while they are traced."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .dataflow import Node, Value, leaves_in, map_leaves, values_in
from .sizes import Size, Sizes, plain

# Functions whose integers are sizes of their results.
_SIZED = frozenset(
    """broadcast_to empty expand full new_empty new_full new_ones new_zeros ones rand randn repeat
    reshape unflatten view zeros arange""".split()
)
# Functions whose results may have sizes that none of their arguments has.
_RESIZING = frozenset(
    """__getitem__ avg_pool1d avg_pool2d cat chunk concat concatenate conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d dstack flatten fold hstack interpolate max_pool1d
    max_pool2d narrow pad repeat repeat_interleave reshape select split tensor_split tile
    unflatten unfold view vstack""".split()
)
_VIEWS = frozenset("flatten reshape unflatten view".split())
# Functions that cut a dimension, and the position of that dimension among their arguments.
_CUTTING = {
    "chunk": 2,
    "narrow": 1,
    "select": 1,
    "split": 2,
    "split_with_sizes": 2,
    "tensor_split": 2,
    "unbind": 1,
    "unfold": 1,
}


def note_sizes(node: Node, sizes: Sizes) -> None:
    """Notes in ``sizes`` what the results of a function tell of the sizes that may differ.

    Sizes that shape a result may differ, also in arithmetic; those that become entries of a tensor,
    or the number of its parts, may not. A literal that is equal to such a size may be meant as it
    is, so that the size may not differ.
    """
    op, args = node.op, node.args
    if op == "__getitem__":
        _note_index(args, sizes)
        return
    if op in _CUTTING and isinstance(args[0], Value):
        dim = _changed_dim(node, len(args[0].shape))
        if dim is not None:
            sizes.fix(sizes.of(args[0].shape[dim]))

    filled = None  # an entry, unlike the sizes before it
    if op.endswith("full"):
        filled = node.kwargs.get("fill_value", args[-1] if args else None)

    def note(leaf: Any) -> None:
        if isinstance(leaf, Size):
            # Of a product that is equal to a constant by chance, nothing more would be noted.
            constant = sizes.constants.difference(sizes.values)
            if op not in _SIZED or leaf is filled or plain(leaf) in constant:
                sizes.fix(leaf)
        elif op in _SIZED and type(leaf) is int and leaf > 0:
            sizes.fix(leaf)
            sizes.constants.add(leaf)

    map_leaves(note, (args, node.kwargs))


def note_results(node: Node, sized: set[int], results: list[Tensor], sizes: Sizes) -> None:
    """Notes in ``sizes`` which sizes of results are made from others than those in ``sized``."""
    values = values_in((node.args, node.kwargs))
    if node.op not in _RESIZING or not values or _only_adds_dimensions(node):
        return
    before = values[0].shape
    if node.op == "__getitem__" and type(node.args[1]) is int:
        before = before[1:]
    for result in results:
        after = tuple(map(int, result.shape))
        if node.op in _VIEWS and sizes.varying(before) == sizes.varying(after):
            if sizes.known(before):  # and so is what is inferred
                sizes.constants.update(set(after).difference(sizes.values))
            continue
        changed = _changed_dim(node, len(before))
        for dim, size in enumerate(after):
            same = len(before) == len(after) and before[dim] == size
            if dim == changed and sizes.constants.issuperset(_along(dim, node.args)):
                sizes.constants.add(size)
            elif not (same and dim != changed) and size not in sized:
                sizes.derive(size)


def _only_adds_dimensions(node: Node) -> bool:
    """Whether a function takes all entries of a tensor, with more dimensions of size 1."""
    if node.op != "__getitem__":
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(part is None or part is Ellipsis or part == slice(None) for part in index)


def _changed_dim(node: Node, rank: int) -> int | None:
    """The dimension that a function joins or cuts, counted from the first."""
    position = 1 if "cat" in node.op else _CUTTING.get(node.op)
    if position is None:
        return None
    dim = node.kwargs.get("dim", node.args[position] if len(node.args) > position else 0)
    return dim % rank if isinstance(dim, int) and -rank <= dim < rank else None


def _along(dim: int, args: tuple[Any, ...]) -> list[int]:
    """The sizes of the arguments of a function along a dimension."""
    return [value.shape[dim] for value in values_in(args) if dim < len(value.shape)]


def sizes_in(tree: Any) -> set[int]:
    """The sizes that may differ among the leaves, as plain integers, unless they are derived."""
    return {plain(size) for size in leaves_in(tree, Size) if size.text.startswith("s[")}


def _note_index(args: tuple[Any, ...], sizes: Sizes) -> None:
    """Notes where the bounds of slices lie relative to the sizes of dimensions."""
    if not isinstance(args[0], Value):
        return
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    shape = args[0].shape
    taken = sum(_dimensions(part) for part in index)
    dim = 0
    for part in index:
        if part is Ellipsis:
            dim += len(shape) - taken
            continue
        if isinstance(part, slice):
            size = sizes.of(shape[dim])
            for bound in (part.start, part.stop):
                if bound is not None:
                    _compare(size, bound)
            parts = size, part.start, part.stop, part.step
            if not any(type(n) is Size for n in parts):
                sizes.constants.add(len(range(*part.indices(size))))
        elif isinstance(part, int) and not isinstance(part, bool):
            _compare(sizes.of(shape[dim]), part)
        dim += _dimensions(part)


def _dimensions(part: Any) -> int:
    """How many dimensions one part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Value) and not part.meta.dtype.is_floating_point:
        return max(1, part.meta.dim()) if str(part.meta.dtype) == "torch.bool" else 1
    return 1


def _compare(size: int, bound: Any) -> None:
    if not isinstance(bound, int):
        if isinstance(size, Size):
            size.sizes.fix(size)
        return
    if plain(bound) < 0:
        bound = -bound
    _ = size > bound, size >= bound  # which a Size notes

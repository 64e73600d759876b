"""What a forward has read besides tensors, and whether it would read the same again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_
from types import CellType, FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "CELL",
    "CODE",
    "DEFAULTS",
    "HOOKS",
    "MISSING",
    "SHAPE",
    "Reads",
    "contents",
    "held_tensors",
    "is_hooked",
    "is_of_python",
    "is_scalar",
    "unchanged",
]

MISSING = object()
HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# Without `operator.attrgetter`, which takes three times as long.
_DTYPE: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]
SHAPE: Callable[[Tensor], torch.Size] = Tensor.shape.__get__  # type: ignore[attr-defined]
_VERSION: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
CELL: Callable[[CellType], Any] = CellType.cell_contents.__get__
CODE: Callable[[FunctionType], Any] = FunctionType.__code__.__get__  # type: ignore[attr-defined]
DEFAULTS: Callable[[FunctionType], Any] = vars(FunctionType)["__defaults__"].__get__

# A dict, a key of it, and what was there.
Row = tuple[dict[str, Any], str, Any]


def is_scalar(value: Any) -> bool:
    """Whether a value is compared by equality; all others are compared by identity."""
    return isinstance(value, _SCALARS)


def is_of_python(name: str) -> bool:
    """Whether a module is of Python's library or of torch."""
    top = name.partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


def is_hooked(module: nn.Module, ignored: Callable[[Any], bool] = lambda hook: False) -> bool:
    """Whether a module has hooks other than the ignored ones."""
    own = object.__getattribute__(module, "__dict__")
    return any(not ignored(hook) for name in HOOKS for hook in own[name].values())


def contents(container: Any) -> list[Any]:
    """The keys and values of a container, or of the attributes of an object."""
    if isinstance(container, (list, tuple)):
        return list(container)
    if isinstance(container, (set, frozenset)):
        return sorted(container, key=id)
    items = container if isinstance(container, dict) else vars(container)
    return [*items, *items.values()]


def held_tensors(module: nn.Module) -> tuple[list[Any], list[Tensor | None]]:
    """Facts of a module's parameters and buffers, with the number of the first equal one; these."""
    numbers: dict[int, int] = {}
    facts: list[Any] = []
    tensors: list[Tensor | None] = []
    for path, m in module.named_modules(remove_duplicate=False):
        for slot in (m._parameters, m._buffers):
            for name, t in slot.items():
                own = None
                if t is not None:
                    number = numbers.setdefault(id(t), len(numbers))
                    own = type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, number
                facts.append((path, name, own))
                tensors.append(t)
    return facts, tensors


def unchanged(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists have the same objects, or equal scalars, in the same order."""
    return len(now) == len(before) and all(map(_same, now, before))


def _same(a: Any, b: Any) -> bool:
    return a is b or (is_scalar(a) and type(a) is type(b) and a == b)


@dataclass(eq=False, repr=False)
class Reads:
    """What the forward of a module has read, in columns that are compared as lists.

    Functions of C go over the columns at every call, in a third of the time of loops in Python.

    Attributes:
        module: whose forward it was.
        modules: itself and its children that were called, and the ``types`` of these.
        hooks: the dicts of hooks of the children, the ``counts`` of these, and whether the children
            were ``hooked``.
        scalars: rows of values that are compared by equality.
        objects: rows of values that are compared by identity.
        parameters: rows of parameters, compared by identity, ``dtypes`` and ``shapes``.
        held: facts of all parameters and buffers that the module held, and these.
        kinds: types, names and values of attributes that were found on types.
        classes: the dicts of the types of ``modules``, and their lengths.
        functions: that were executed, and their code, which a notebook may exchange.
        defaults: those of them that have defaults, and these.
        cells: cells of functions that were called or read, and their contents.
        containers: containers and objects whose contents were read, and the contents.
        pinned: tensors whose values were read, and the versions of these.
        free: rows, by holder's id and name, in which siblings may differ.
    """

    module: nn.Module
    modules: list[nn.Module] = field(default_factory=list)
    types: list[type] = field(default_factory=list)
    hooks: list[dict[int, Any]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    hooked: bool = False
    scalars: tuple[list[dict[str, Any]], list[str], list[Any]] = field(
        default_factory=lambda: ([], [], [])
    )
    objects: tuple[list[dict[str, Any]], list[str], list[Any]] = field(
        default_factory=lambda: ([], [], [])
    )
    parameters: tuple[list[dict[str, Any]], list[str], list[Tensor]] = field(
        default_factory=lambda: ([], [], [])
    )
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    held: tuple[list[Any], list[Tensor | None]] = field(default_factory=lambda: ([], []))
    kinds: tuple[list[type], list[str], list[Any]] = field(default_factory=lambda: ([], [], []))
    classes: tuple[list[MappingProxyType[str, Any]], list[int]] = field(
        default_factory=lambda: ([], [])
    )
    functions: tuple[list[FunctionType], list[Any]] = field(default_factory=lambda: ([], []))
    defaults: tuple[list[FunctionType], list[Any]] = field(default_factory=lambda: ([], []))
    cells: tuple[list[CellType], list[Any]] = field(default_factory=lambda: ([], []))
    containers: list[tuple[Any, list[Any]]] = field(default_factory=list)
    pinned: tuple[list[Tensor], list[int]] = field(default_factory=lambda: ([], []))
    free: frozenset[tuple[int, str]] = frozenset()

    def add_row(self, holder: dict[str, Any], name: str, value: Any) -> None:
        """Adds one row to the columns for its kind of value."""
        if isinstance(value, nn.Parameter):
            columns: Any = self.parameters
            self.dtypes.append(value.dtype)
            self.shapes.append(value.shape)
        else:
            columns = self.scalars if is_scalar(value) else self.objects
        for column, entry in zip(columns, (holder, name, value)):
            column.append(entry)

    def rows(self) -> Iterator[Row]:
        for columns in (self.scalars, self.objects, self.parameters):
            yield from zip(*columns)

    def pin(self, tensor: Tensor) -> None:
        """Has the reads hold only as long as nothing is written to a tensor."""
        self.pinned[0].append(tensor)
        self.pinned[1].append(tensor._version)

    def current(self) -> bool:
        """Whether the forward would read the same now."""
        parameters = self.parameters
        return (
            all(map(is_, map(dict.get, parameters[0], parameters[1]), parameters[2]))
            and [*map(_DTYPE, parameters[2])] == self.dtypes
            and [*map(SHAPE, parameters[2])] == self.shapes
            and self.current_but_parameters()
        )

    def current_but_parameters(self) -> bool:
        """Whether it would, if it found the same parameters."""
        scalars, objects, kinds = self.scalars, self.objects, self.kinds
        cells, functions, pinned = self.cells, self.functions, self.pinned
        get, absent = dict.get, repeat(MISSING)
        try:
            return (
                [*map(get, scalars[0], scalars[1], absent)] == scalars[2]
                and all(map(is_, map(get, objects[0], objects[1], absent), objects[2]))
                and [*map(type, self.modules)] == self.types
                and (not (any(self.hooks) or self.hooked) or [*map(len, self.hooks)] == self.counts)
                and [*map(getattr, kinds[0], kinds[1], absent)] == kinds[2]
                and [*map(len, self.classes[0])] == self.classes[1]
                and [*map(CODE, functions[0])] == functions[1]
                and [*map(DEFAULTS, self.defaults[0])] == self.defaults[1]
                and (not cells[0] or all(map(is_, map(CELL, cells[0]), cells[1])))
                and all(unchanged(contents(c), before) for c, before in self.containers)
                and (not pinned[0] or [*map(_VERSION, pinned[0])] == pinned[1])
            )
        except (RuntimeError, ValueError):  # of values that cannot be compared, such as arrays
            return False

"""Calls that were recorded as text: arguments are names of tensors, or constants."""

from __future__ import annotations

import builtins
import keyword
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import torch_internals as internals
from ..lines import tuple_text
from .functions import NotRecordableError, tensors_in
from .memory import marked

_GIVEN = "xpeksdtg"
_RESERVED = frozenset(
    "forward backward parameters extra_inputs kept saved received stream dy "
    "current_stream scratch numbers free".split()
)


class Names:
    """What names in recorded lines stand for.

    Args:
        name_of: the name of a tensor; None if it is of no call that was noted.
        caches: what else the pass is called with, by name.

    Attributes:
        bound: what names stand for, besides tensors.
    """

    def __init__(
        self, name_of: Callable[[Tensor], str | None], caches: dict[str, Any] | None
    ) -> None:
        self._name_of = name_of
        self.caches = caches or {}
        self.bound: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def call(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], reads: list[str]
    ) -> str:
        """A call; ``reads`` gets the names of the tensors in it."""
        if name == "__get__":
            return f"{self.value(args[0], reads)}.{func.__self__.__name__}"
        if name in ("__getitem__", "__setitem__"):
            at = f"{self.value(args[0], reads)}[{self._index(args[1], reads)}]"
            return at if name == "__getitem__" else f"{at} = {self.value(args[2], reads)}"
        own = getattr(Tensor, name, None)
        is_method = own is func and args and isinstance(args[0], Tensor)
        rest = [self.value(a, reads) for a in args] if not is_method else []
        if is_method:
            target = self.value(args[0], reads)
            rest = [self.value(a, reads) for a in args[1:]]
        for key, value in kwargs.items():
            rest.append(f"{key}={self.value(value, reads)}")
        if is_method:
            return f"{target}.{name}({', '.join(rest)})"
        # An overload's call is a function in Python around this one.
        called = internals.called_by(func) if isinstance(func, internals.OpOverload) else func
        return f"{self.bind(called, name)}({', '.join(rest)})"

    def _index(self, index: Any, reads: list[str]) -> str:
        if isinstance(index, tuple):
            return ", ".join(self._index(part, reads) for part in index) or "()"
        if isinstance(index, slice):
            if tensors_in([index.start, index.stop, index.step]):
                raise NotRecordableError("the size of a result depends on values")
            parts = ["" if part is None else self.value(part, reads) for part in
                     (index.start, index.stop)]  # fmt: skip
            step = "" if index.step is None else f":{self.value(index.step, reads)}"
            return f"{parts[0]}:{parts[1]}{step}"
        if index is Ellipsis:
            return "..."
        masks = [t for t in tensors_in(index) if t.dtype in (torch.bool, torch.uint8)]
        if masks:
            raise NotRecordableError("a mask selects elements, whose number depends on values")
        return self.value(index, reads)

    def value(self, value: Any, reads: list[str]) -> str:
        """An argument: a tensor by its name, anything else as a constant."""
        if isinstance(value, Tensor):
            name = self._name_of(value)
            if name is None:
                raise NotRecordableError("a tensor comes from elsewhere than from the calls seen")
            reads.append(name)
            return marked(name)
        if value is None or isinstance(value, bool):
            return repr(value)
        if isinstance(value, str):
            return str.__repr__(value)  # also of an enumeration
        if isinstance(value, int):
            return repr(int(value))
        if isinstance(value, float):
            return self.number(value)
        if isinstance(value, (tuple, torch.Size)):
            return tuple_text([self.value(part, reads) for part in value])
        if isinstance(value, list):
            return f"[{', '.join(self.value(part, reads) for part in value)}]"
        if isinstance(value, torch.dtype):
            return self.bind(value, str(value).partition(".")[2])
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return self.bind(value, type(value).__name__.strip("_"))
        if dist.is_available() and isinstance(value, dist.ProcessGroup):
            return self.bind(value, "group")
        cache = next((name for name, given in self.caches.items() if given is value), None)
        if cache is None:
            raise NotRecordableError(f"an argument of type {type(value).__name__} is no constant")
        return cache

    def number(self, value: float) -> str:
        """A float."""
        return repr(float(value)) if math.isfinite(value) else self.bind(value, "number")

    def bind(self, value: Any, name: str) -> str:
        """A name that stands for ``value``: the one asked for, or one like it."""
        known = self._names.get(id(value))
        if known is not None and (self.bound[known] is value):
            return known
        if isinstance(value, (torch.device, tuple)):
            for own, other in self.bound.items():
                if type(other) is type(value) and other == value and repr(other) == repr(value):
                    return own
        if not name.isidentifier() or keyword.iskeyword(name) or hasattr(builtins, name):
            name = f"{name}_" if f"{name}_".isidentifier() else "function"
        if name[0] in _GIVEN and (name[1:].isdigit() or not name[1:]):
            name = f"{name}_"
        taken, number = name, 2
        while taken in self.bound or taken in _RESERVED or taken in self.caches:
            taken, number = f"{name}_{number}", number + 1
        self.bound[taken] = value
        self._names[id(value)] = taken
        return taken

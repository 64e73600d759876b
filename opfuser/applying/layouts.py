"""How the arguments of a call are laid out, as functions that are written for one layout each.

Such a function tells in one or two microseconds whether another call is like one that was looked at
leaf by leaf, which takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..reading.dataflow import map_leaves
from ..reading.reads import is_scalar
from ..reading.stand_ins import is_cache

# What a call was given: its tensors, each once, in order of arguments and keywords; the shapes of
# these; and a cache of keys and values, or None. No named tuple, which takes 0.3 us to make.
Given = tuple[tuple[Tensor, ...], tuple[tuple[int, ...], ...], Any]
# What a call with such a layout was given; None for any other call.
Layout = Callable[[tuple[Any, ...], dict[str, Any]], "Given | None"]

_compiled: dict[str, Any] = {}


def layout_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout | None:
    """The layout of a call's arguments; None if one of them is of a type that is not known.

    Calls of one layout differ in sizes alone: structure, numbers and texts, and of tensors dtype,
    device, whether they require gradients, and which of them are the same, are equal.
    """
    writer = _Writer()
    if not writer.write_all("args", args) or not writer.write_keywords(kwargs):
        return None
    return writer.function()


def given_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """What a call was given, leaf by leaf."""
    tensors: dict[int, Tensor] = {}
    caches: list[Any] = []

    def note(leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            tensors.setdefault(id(leaf), leaf)
        elif is_cache(leaf):
            caches.append(leaf)

    map_leaves(note, (args, kwargs))
    inputs = tuple(tensors.values())
    return inputs, tuple(t.shape for t in inputs), caches[0] if caches else None


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bound: dict[str, Any] = {}
        self.tensors: dict[int, str] = {}  # the name of each
        self.caches: list[str] = []
        self.count = 0

    def bind(self, value: Any) -> str:
        """A name that stands for a value in the text."""
        name = f"c{len(self.bound)}"
        self.bound[name] = value
        return name

    def refuse(self, condition: str) -> None:
        self.lines += [f"if {condition}:", "    return None"]

    def names(self, count: int) -> list[str]:
        self.count += count
        return [f"x{n}" for n in range(self.count - count, self.count)]

    def write_all(self, name: str, parts: tuple[Any, ...] | list[Any]) -> bool:
        self.refuse(f"len({name}) != {len(parts)}")
        inner = self.names(len(parts))
        if inner:
            self.lines.append(f"{', '.join(inner)}, = {name}")
        return all(map(self.write, inner, parts))

    def write_keywords(self, kwargs: dict[str, Any]) -> bool:
        self.refuse(f"[*kwargs] != {self.bind(list(kwargs))}")
        inner = self.names(len(kwargs))
        if inner:
            self.lines.append(f"{', '.join(inner)}, = kwargs.values()")
        return all(map(self.write, inner, kwargs.values()))

    def write(self, name: str, leaf: Any) -> bool:
        if leaf is None or type(leaf) is bool:
            self.refuse(f"{name} is not {leaf}")
        elif is_scalar(leaf):
            kind, value = self.bind(type(leaf)), self.bind(leaf)
            self.refuse(f"type({name}) is not {kind}")
            if leaf != leaf or leaf == 0:  # noqa: PLR0124 - nan, and 0.0, which -0.0 is equal to
                name, value = f"repr({name})", self.bind(repr(leaf))
            self.refuse(f"{name} != {value}")
        elif type(leaf) in (Tensor, nn.Parameter):
            self.write_tensor(name, leaf)
        elif type(leaf) in (tuple, list):
            self.refuse(f"type({name}) is not {type(leaf).__name__}")
            return self.write_all(name, leaf)
        elif is_cache(leaf) and not self.caches:
            self.refuse(f"type({name}) is not {self.bind(type(leaf))}")
            self.caches.append(name)
        else:
            return False
        return True

    def write_tensor(self, name: str, t: Tensor) -> None:
        if id(t) in self.tensors:
            self.refuse(f"{name} is not {self.tensors[id(t)]}")
            return
        kind, dtype, device = map(self.bind, (type(t), t.dtype, t.device))
        others = "".join(f" or {name} is {other}" for other in self.tensors.values())
        self.refuse(
            f"type({name}) is not {kind} or {name}.dtype is not {dtype} or "
            f"{name}.requires_grad is not {t.requires_grad} or {name}.device != {device}{others}"
        )
        self.tensors[id(t)] = name

    def function(self) -> Layout:
        tensors = self.tensors.values()
        inputs = "".join(f"{name}, " for name in tensors)
        shapes = "".join(f"{name}.shape, " for name in tensors)
        cache = self.caches[0] if self.caches else "None"
        self.lines.append(f"return ({inputs}), ({shapes}), {cache}")
        text = "def layout(args, kwargs):\n    " + "\n    ".join(self.lines)
        if text not in _compiled:
            _compiled[text] = compile(text, "<opfuser layout of arguments>", "exec")
        # Names and values in the text are this module's own, all else is bound.
        exec(_compiled[text], self.bound)
        made: Layout = self.bound["layout"]
        return made

"""Whether a forward would read the same again, as functions that are written for what was read.

They take a third of the time of :meth:`Reads.current`, which decides the same.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

from ..reading.reads import MISSING, Reads

__all__ = ["check_of"]

_compiled: dict[str, Callable[..., Callable[[], bool]]] = {}


def check_of(reads: Reads) -> Callable[[], bool]:
    """Whether all is as it was read, as a function; siblings share its code."""
    if reads.containers or reads.pinned[0] or reads.cells[0] or reads.hooked:
        return reads.current
    writer = _Writer()
    for holder, name, value in reads.rows():
        writer.row(holder, name, value)
    for parameter, dtype in zip(reads.parameters[2], reads.dtypes):
        writer.conditions.append(f"{writer.name(parameter)}.dtype is {writer.name(dtype)}")
    for module, kind in zip(reads.modules, reads.types):
        writer.conditions.append(f"type({writer.name(module)}) is {writer.name(kind)}")
    return writer.function(reads)


class _Writer:
    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.values: list[Any] = []
        self.conditions: list[str] = []

    def name(self, value: Any) -> str:
        if id(value) not in self.names:
            self.names[id(value)] = f"v{len(self.values)}"
            self.values.append(value)
        return self.names[id(value)]

    def row(self, holder: dict[str, Any], name: str, value: Any) -> None:
        if value is MISSING:
            self.conditions.append(f"{name!r} not in {self.name(holder)}")
        elif value is None or type(value) is bool:
            self.conditions.append(f"{self.name(holder)}[{name!r}] is {value}")
        else:
            same = "==" if type(value) in (int, float, complex, str, bytes) else "is"
            self.conditions.append(f"{self.name(holder)}[{name!r}] {same} {self.name(value)}")

    def function(self, reads: Reads) -> Callable[[], bool]:
        kinds, names, found = map(self.name, reads.kinds)
        hooks = self.name(reads.hooks)
        tests = [
            *self.conditions,
            f"not any({hooks})",
            f"[*map(getattr, {kinds}, {names}, repeat(MISSING))] == {found}",
        ]
        text = "\n".join(
            (
                f"def make({', '.join(f'v{n}' for n in range(len(self.values)))}):",
                "    def check():",
                "        try:",
                f"            return {' and '.join(tests)}",
                "        except KeyError:",
                "            return False",
                "    return check",
            )
        )
        if text not in _compiled:
            space: dict[str, Any] = {"MISSING": MISSING, "repeat": repeat}
            # Texts of this module, and names of attributes as literals.
            exec(text, space)
            _compiled[text] = space["make"]
        return _compiled[text](*self.values)

"""Whether a forward would read the same again, as functions that are written for what was read.

They take half the time of :meth:`Reads.current`, which decides nearly the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor

from ..reading.reads import CELL, CODE, DEFAULTS, MISSING, SHAPE, Reads

__all__ = ["Checks", "checks_of", "with_exchanged_parameters"]

_SLOTS = "_parameters", "_buffers", "_modules"

_compiled: dict[str, Callable[..., Callable[[], bool]]] = {}


class Checks(NamedTuple):
    """Functions that say whether all is as it was read.

    Attributes:
        current: whether all is.
        granted: whether that is which :meth:`Reads.current` takes for granted: modules hold their
            children and parameters in the same dicts, and parameters that needed no gradient need
            none, as a forward may compute some of them without gradients.
    """

    current: Callable[[], bool]
    granted: Callable[[], bool]


def checks_of(reads: Reads) -> Checks:
    """The checks of what was read; siblings share their code."""
    writer = _Writer()
    held = {id(holder) for holder, _, _ in reads.rows()}
    for module in reads.modules:
        own = module.__dict__
        for slot in _SLOTS:
            if id(own[slot]) in held:
                writer.row(own, slot, own[slot])
    for parameter in reads.parameters[2]:
        if not parameter.requires_grad:
            writer.conditions.append(f"{writer.name(parameter)}.requires_grad is False")
    granted = writer.function()
    if reads.containers or reads.pinned[0] or reads.hooked:
        writer.conditions.append(f"{writer.name(reads.current)}()")
    else:
        writer.columns(reads)
    return Checks(writer.function(), granted)


def with_exchanged_parameters(reads: Reads) -> Reads | None:
    """What was read, with the parameters that are there now; None if more has changed.

    What a forward computes does not depend on which parameters it finds, as long as they are of the
    same kind and as many.
    """
    holders, names, before = reads.parameters
    now: list[Any] = [*map(dict.get, holders, names)]
    read = {id(holder) for holder, _, _ in reads.rows()}
    if any(id(vars(t)) in read for t in before):  # of which an attribute was read
        return None
    pairs = {id(old): new for old, new in zip(before, now)}
    for old, new in zip(before, now):
        if pairs[id(old)] is not new or type(new) is not type(old) or _facts(new) != _facts(old):
            return None
    containers = [(c, [pairs.get(id(x), x) for x in inside]) for c, inside in reads.containers]
    held = reads.held[0], [pairs.get(id(t), t) for t in reads.held[1]]
    made = replace(reads, parameters=(holders, names, now), containers=containers, held=held)
    return made if made.current() else None


def _facts(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad


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

    def kind(self, kind: type, name: str, value: Any) -> None:
        found = f"{self.name(kind)}.{name}"
        if value is MISSING or not name.isidentifier():
            found = f"getattr({self.name(kind)}, {name!r}, MISSING)"
        same = "is" if isinstance(value, FunctionType | property) or value is MISSING else "=="
        self.conditions.append(f"{found} {same} {self.name(value)}")

    def columns(self, reads: Reads) -> None:
        """Writes what :meth:`Reads.current` compares."""
        for row in reads.rows():
            self.row(*row)
        for parameter, dtype in zip(reads.parameters[2], reads.dtypes):
            self.conditions.append(f"{self.name(parameter)}.dtype is {self.name(dtype)}")
        for module, kind in zip(reads.modules, reads.types):
            self.conditions.append(f"type({self.name(module)}) is {self.name(kind)}")
        for kind, name, value in zip(*reads.kinds):
            self.kind(kind, name, value)
        parameters, shapes = self.name(reads.parameters[2]), self.name(reads.shapes)
        (functions, codes), (with_defaults, defaults), (classes, lengths) = (
            map(self.name, columns) for columns in (reads.functions, reads.defaults, reads.classes)
        )
        self.conditions += [
            f"[*map(shape_of, {parameters})] == {shapes}",
            f"not any({self.name(reads.hooks)})",
            f"[*map(len, {classes})] == {lengths}",
            f"[*map(code_of, {functions})] == {codes}",
            f"[*map(defaults_of, {with_defaults})] == {defaults}",
        ]
        if reads.cells[0]:
            cells, inside = map(self.name, reads.cells)
            self.conditions.append(f"all(map(is_, map(inside_of, {cells}), {inside}))")

    def function(self) -> Callable[[], bool]:
        text = "\n".join(
            (
                f"def make({', '.join(f'v{n}' for n in range(len(self.values)))}):",
                "    def check():",
                "        try:",
                f"            return {' and '.join(self.conditions) or 'True'}",
                # What is not there, and values such as arrays that cannot be compared.
                "        except (AttributeError, KeyError, RuntimeError, ValueError):",
                "            return False",
                "    return check",
            )
        )
        if text not in _compiled:
            space: dict[str, Any] = {"MISSING": MISSING, "is_": is_, "shape_of": SHAPE}
            space |= {"code_of": CODE, "defaults_of": DEFAULTS, "inside_of": CELL}
            # Texts of this module, and names of attributes as literals.
            exec(text, space)
            _compiled[text] = space["make"]
        return _compiled[text](*self.values)

"""What was read of a module, as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ..reading.operations import Called, MergedLinear, Operation, Parallel, Reading, Residual

__all__ = ["children_called", "described"]


def described(reading: Reading) -> str:
    """The operations, such as ``"x + (Norm, Linear, Activation, Linear)"``."""
    return _all(reading.operations)


def _all(operations: Iterable[Operation]) -> str:
    return ", ".join(map(_text, operations))


def _text(op: Operation) -> str:
    if isinstance(op, Residual):
        return f"x + ({_all(op.branch)})"
    if isinstance(op, Parallel):
        return " + ".join(f"({_all(branch)})" for branch in op.branches)
    if isinstance(op, MergedLinear):
        return f"MergedLinear x{len(op.projections)}"
    return f"'{op.path}'" if isinstance(op, Called) else type(op).__name__


def children_called(reading: Reading) -> tuple[str, ...]:
    """The children that are called as they are, and why."""
    return tuple(f"'{op.path}' is called: it {op.reason}" for op in _called(reading.operations))


def _called(tree: Any) -> Iterator[Called]:
    if isinstance(tree, Called):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree:
            yield from _called(part)
    elif is_dataclass(tree):
        for part in fields(tree):
            yield from _called(getattr(tree, part.name))

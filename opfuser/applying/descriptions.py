"""What was read of a module, as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ..reading.operations import (
    Attention,
    Beside,
    Called,
    LoRALinear,
    MergedLinear,
    Operation,
    Parallel,
    Reading,
    Residual,
    Times,
)

_JOINTS: dict[type, str] = {Parallel: " + ", Times: " * ", Beside: " beside "}


def described(reading: Reading) -> str:
    """The operations, such as ``"x + (Norm, Linear, Activation, Linear)"``."""
    return _all(reading.operations)


def _all(operations: Iterable[Operation]) -> str:
    return ", ".join(map(_text, operations))


def _text(op: Operation) -> str:
    if isinstance(op, Residual):
        return f"x + ({_all(op.branch)})"
    if isinstance(op, (Parallel, Times, Beside)):
        return _JOINTS[type(op)].join(f"({_all(branch)})" for branch in op.branches)
    if isinstance(op, MergedLinear):
        adapted = any(isinstance(p, LoRALinear) for p in op.projections)
        return f"{'LoRALinear' if adapted else 'MergedLinear'} x{len(op.projections)}"
    return f"'{op.path}'" if isinstance(op, Called) else type(op).__name__


def children_called(reading: Reading) -> list[tuple[str, str]]:
    """The paths of children that are called as they are, and why."""
    return [(op.path, op.reason) for op in operations_in(reading) if isinstance(op, Called)]


def operations_in(tree: Any) -> Iterator[Operation]:
    """All operations, those inside of others too."""
    if isinstance(tree, tuple):
        for part in tree:
            yield from operations_in(part)
    elif is_dataclass(tree):
        if isinstance(tree, Operation):
            yield tree
        for part in fields(tree):
            yield from operations_in(getattr(tree, part.name))


def masks_in(reading: Reading) -> tuple[tuple[int, bool], ...]:
    """The numbers of inputs that are masks or biases of attention, and which are read strictly.

    Those are biases, and masks that stand for a number and are not added as it.
    """
    found: dict[tuple[int, bool], None] = {}
    for op in operations_in(reading):
        if isinstance(op, Attention):
            alone = len(op.masks) == 1
            found.update(((m.input, alone and m.lowest is not None), None) for m in op.masks)
            if isinstance(op.bias, int):
                found[op.bias, True] = None
    return tuple(found)

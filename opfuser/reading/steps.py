"""A piece of what a forward computes, as the reader puts it together."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

from .dataflow import Call, Node, Value
from .kept import KeptError
from .operations import (
    Attention,
    CrossAttention,
    ForkedAttention,
    Linear,
    MergedLinear,
    Operation,
    Transpose,
)


class Step(NamedTuple):
    """Operations, first to last.

    Attributes:
        source: what they are computed from.
        path: the values between them, from the result back to the source.
        tokens: the sizes that rows of the source have where attention, a child that is called, or
            what exchanges the first two dimensions needs to know them.
        once: what has to happen once: random numbers that were drawn, children that were called.
        written: nodes that write to a tensor of their own, such as a mask.
        returned: other outputs of the module that operations hand out.
    """

    operations: tuple[Operation, ...]
    source: Value
    path: tuple[Value, ...] = ()
    tokens: frozenset[tuple[int, ...]] = frozenset()
    once: tuple[Node | Call, ...] = ()
    written: frozenset[Node] = frozenset()
    returned: frozenset[Value] = frozenset()

    def followed_by(self, *later: Step) -> Step:
        """These operations, then others; the source stays."""
        out = self
        for step in later:
            exchanged = out.operations.count(Transpose()) % 2
            out = Step(
                _joined(out.operations + step.operations),
                self.source,
                step.path + out.path,
                out.tokens | {t[::-1] if exchanged else t for t in step.tokens},
                out.once + step.once,
                out.written | step.written,
                out.returned | step.returned,
            )
        return out


def _joined(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """The operations; rows are exchanged before linear functions, and not if that is undone."""
    if Transpose() not in operations:
        return operations
    out: list[Operation] = []
    for op in operations:
        place = len(out)
        while op == Transpose() and place and _is_linear(out[place - 1]):
            place -= 1
        if op == Transpose() and place and out[place - 1] == op:
            del out[place - 1]
        else:
            out.insert(place, op)
    return tuple(out)


def _branches(operation: Operation) -> list[tuple[Operation, ...]]:
    """The operations inside of one, branch by branch, without those of another input."""
    other = "memory" if isinstance(operation, CrossAttention) else ""
    values = [getattr(operation, f.name) for f in fields(operation) if f.name != other]
    tuples = [value for value in values if isinstance(value, tuple)]
    nested = [branch for value in tuples for branch in value if isinstance(branch, tuple)]
    return [b for b in (*nested, *tuples) if b and all(isinstance(op, Operation) for op in b)]


def attends(operations: tuple[Operation, ...]) -> bool:
    """Whether there is attention among operations, or inside of them."""
    kinds = Attention, CrossAttention, ForkedAttention
    return any(isinstance(op, kinds) or any(map(attends, _branches(op))) for op in operations)


def exchanges(operations: tuple[Operation, ...]) -> bool:
    """Whether the first two dimensions of rows are exchanged after operations.

    Raises:
        KeptError: they are after those of a branch.
    """
    if any(exchanges(branch) for op in operations for branch in _branches(op)):
        raise KeptError("exchanges batch and sequence in one branch alone")
    return operations.count(Transpose()) % 2 == 1


def _is_linear(operation: Operation) -> bool:
    parts = operation.projections if isinstance(operation, MergedLinear) else (operation,)
    return all(isinstance(part, Linear) for part in parts)

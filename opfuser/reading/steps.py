"""A piece of what a forward computes, as the reader puts it together."""

from __future__ import annotations

from typing import NamedTuple

from .dataflow import Call, Node, Value
from .operations import Operation

__all__ = ["Step"]


class Step(NamedTuple):
    """Operations, first to last.

    Attributes:
        source: what they are computed from.
        path: the values between them, from the result back to the source.
        tokens: batch and sequence of the attention among them.
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
            out = Step(
                out.operations + step.operations,
                self.source,
                step.path + out.path,
                out.tokens | step.tokens,
                out.once + step.once,
                out.written | step.written,
                out.returned | step.returned,
            )
        return out

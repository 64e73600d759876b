"""Fused operations: basic ones that are executed as one, and compounds, which stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from torch import nn

from ...errors import ArgumentError, ArgumentTypeError
from .basic import BasicOperation
from .fusible import FusibleOperation


class FusedOperation(FusibleOperation):
    """What plans and programs know of :class:`opfuser.FusedOperation`."""

    saves_more: ClassVar[bool] = False
    handle: ClassVar[Any]

    basic_ops: Sequence[BasicOperation]

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        parts = list(_flatten(basic_ops))
        if not parts:
            raise ArgumentError.explained(
                "A fused operation must cover at least one basic operation",
                where=type(self).__name__,
            )
        self._set_parts(parts)

    def _set_parts(self, parts: list[Any]) -> None:
        self.basic_ops = nn.ModuleList(parts)  # type: ignore[assignment]

    @property
    def is_fused_op(self) -> bool:
        return True

    @classmethod
    def is_compound(cls) -> bool:
        """Whether operations of this class have no kernel and stand for their basic operations."""
        return (
            cls.fuser_forward is FusibleOperation.fuser_forward
            and cls.fuser_backward is FusibleOperation.fuser_backward
        )

    def get_input_quantizer(self) -> Any | None:
        return self.basic_ops[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Any | None:
        return self.basic_ops[-1].get_grad_output_quantizer()

    def pre_first_fuser_forward(self) -> None:
        for op in self.basic_ops:
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.basic_ops:
            op.pre_fuser_forward(requires_grad=requires_grad)


def _flatten(ops: Iterable[FusibleOperation]) -> Iterator[BasicOperation]:
    for op in ops:
        if isinstance(op, FusedOperation):
            yield from op.basic_ops
        elif isinstance(op, BasicOperation):
            yield op
        else:
            raise ArgumentTypeError.explained(
                "A fused operation consists of operations", received=type(op).__name__
            )

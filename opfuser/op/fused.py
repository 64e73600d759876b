"""Fused operations: basic ones that are executed as one, and compounds, which stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import ArgumentError, ArgumentTypeError
from .basic import BasicOperation
from .fusible import FusibleOperation, StandaloneCalls


class FusedOperation(FusibleOperation):
    """Consecutive basic operations executed as one.

    One that overrides neither ``fuser_forward`` nor ``fuser_backward`` is a compound, such as
    ``Linear``: a Sequential replaces it by its basic operations. Any other owns no parameters; its
    basic operations do.

    Args:
        basic_ops: the basic operations it replaces, in forward order.

    Raises:
        ArgumentError: there are none.
        ArgumentTypeError: one is no operation.

    Class attributes:
        saves_more: declares that its forward saves more bytes than the operations that it replaces;
            :func:`opfuser.testing.check_fusion` fails for others that do.
        handle: the ``FusionHandle`` of a class that :func:`opfuser.fusion` registered.
    """

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

    def _set_parts(self, parts: list[BasicOperation]) -> None:
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

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Runs this operation alone."""
        return StandaloneCalls.run_alone(self, input, extra_inputs, basic_op_kwargs)


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

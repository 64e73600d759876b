"""What collectives that are operations of their own have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ..distributed.collectives import GroupRef, check_sequence_dim, group_size, refuse_reference
from ..op import BasicOperation, OperationContext, OperationGrads

Exchange = Callable[[Tensor, "dist.ProcessGroup | None", int], Tensor]
"""Of a tensor, over a group, along a dimension."""


class Collective(BasicOperation):
    """An exchange among the ranks of a process group; in a group of one rank, the identity."""

    communicates = True

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return group_size(self.process_group) == 1

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = GroupRef(process_group)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that take part; None is all."""
        return self._group.group

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        refuse_reference(self.process_group, type(self).__name__)
        return input_.clone()

    def extra_repr(self) -> str:
        return f"ranks={group_size(self.process_group)}"


class CollectiveAlong(Collective):
    """One along a dimension, and the one that its backward is: ``passes``."""

    passes: ClassVar[tuple[Exchange, Exchange]]
    read_only: ClassVar[frozenset[str]] = frozenset({"dim"})

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, dim: int = 0) -> None:
        super().__init__(process_group)
        check_sequence_dim(dim, type(self).__name__, "dim")
        self.dim = dim

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        if group_size(self.process_group) == 1:
            return input_
        return self.passes[0](input_, self.process_group, self.dim)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        if not ctx.needs.input or group_size(self.process_group) == 1:
            return grad_output, ()
        return self.passes[1](grad_output, self.process_group, self.dim), ()

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return f"{text}, dim={self.dim}" if self.dim else text

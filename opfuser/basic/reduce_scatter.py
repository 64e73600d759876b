"""Sum over the ranks of a process group, of which each keeps a slice."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ..op import BasicOperation, OperationContext
from ._distributed import (
    GroupRef,
    check_sequence_dim,
    gather,
    group_size,
    reduce_scatter,
    refuse_reference,
)

__all__ = ["ReduceScatter"]


class ReduceScatter(BasicOperation):
    """This rank's slice, along a dimension, of the sum of the ranks' inputs.

    Shapes: x ``(..., ranks · N, ...)``, y ``(..., N, ...)``; ``y_r = Σ_s x_s[r]``. Backward gathers
    the ranks' gradients. In a group of one rank, or where torch.distributed is not initialised, the
    identity.

    Args:
        process_group: None is all ranks.
        dim: the dimension, from 0. Other than the first, which collectives take, it costs a copy,
            unless those in front of it are of size 1.

    Raises:
        ArgumentError: ``dim`` is negative.
        InputError: that dimension of x is no multiple of the group size.
    """

    communicates = True
    read_only: ClassVar[frozenset[str]] = frozenset({"dim"})

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return group_size(self.process_group) == 1

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, dim: int = 0) -> None:
        super().__init__()
        check_sequence_dim(dim, type(self).__name__, "dim")
        self.dim = dim
        self._group = GroupRef(process_group)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that take part; None is all."""
        return self._group.group

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
        return reduce_scatter(input_, self.process_group, self.dim)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[()]]:
        if not ctx.needs.input or group_size(self.process_group) == 1:
            return grad_output, ()
        return gather(grad_output, self.process_group, self.dim), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        refuse_reference(self.process_group, type(self).__name__)
        return input_.clone()

    def extra_repr(self) -> str:
        text = f"ranks={group_size(self.process_group)}"
        return f"{text}, dim={self.dim}" if self.dim else text

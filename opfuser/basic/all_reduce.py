"""Sum over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..distributed.collectives import all_reduce, group_size
from ..errors import NotSupportedError
from ..op import OperationContext, OperationGrads
from ._collective import Collective


class AllReduce(Collective):
    """Sum of the ranks' inputs: :math:`y = Σ_r x_r`.

    Shapes: x and y alike, any, the same on all ranks; y has the dtype of x. Every rank is taken to
    use its (identical) output in the same way, so that the gradients of y are identical too and
    ``dx = dy``. In a group of one rank, or where torch.distributed is not
    initialised, the identity.

    Args:
        process_group: None is all ranks.
        reduce_in_backward: part of te.ops' signature, without effect there; only True is accepted.

    Raises:
        NotSupportedError: ``reduce_in_backward`` is not True.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, reduce_in_backward: bool = True
    ) -> None:
        if reduce_in_backward is not True:
            raise NotSupportedError.explained(
                "reduce_in_backward must be True: backward passes on gradients, which are "
                "identical on all ranks",
                where=type(self).__name__,
                received=repr(reduce_in_backward),
            )
        super().__init__(process_group)

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
        return all_reduce(input_, self.process_group)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        return grad_output, ()

"""Additive bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.context import COMPUTE_DTYPES, refuse_dtype
from ..distributed.collectives import GroupRef, group_size
from ..errors import ArgumentError, InputError
from ..gemm import Weight
from ..op import BasicOperation, OperationContext, OperationGrads
from ..runtime.tracing import each_column
from ._dtypes import check_parameter_dtype


def bias_grad(grad_output: Tensor) -> Tensor:
    """``db = Σ dy`` over all dimensions but the last; ATen rounds only the final sum.

    A distinct tensor even if there is nothing to sum: autograd may accumulate into it in place.
    """
    ndim = grad_output.dim()
    if ndim < 2:
        return grad_output.clone()
    # Torch takes one dimension as an int a quarter of a microsecond faster than as a tuple.
    dims = 0 if ndim == 2 else tuple(range(ndim - 1))
    if torch.compiler.is_compiling():
        return each_column(lambda dy: dy.sum(dims), grad_output)
    return grad_output.sum(dims)


class Bias(BasicOperation):
    r"""Adds a bias along the last dimension: :math:`y = x + b`.

    Shapes: x and y ``(..., size)``, b ``(size,)``. The output has the dtype of x, to which b is
    cast. A bias of None makes this the identity. The bias starts at zero.

    Args:
        size: the last dimension, over all ranks.
        device: of the bias; None is torch's default.
        dtype: of the bias; None is torch's default.
        tensor_parallel: distribute the last dimension over the ranks of the group.
        tensor_parallel_group: None is all ranks.

    Raises:
        ArgumentError: ``size`` is negative, or no multiple of the group size; or ``dtype`` is not
            fp16, bf16, fp32 or fp64.
        InputError: the last dimension of x is not the local size; or x is not fp16, bf16, fp32 or
            fp64, and not of the dtype of the bias either.
    """

    read_only: ClassVar[frozenset[str]] = frozenset(
        {"size", "local_size", "tensor_parallel", "tensor_parallel_size"}
    )

    bias: nn.Parameter | None

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_parameter_dtype(dtype, type(self).__name__)
        ranks = group_size(tensor_parallel_group) if tensor_parallel else 1
        if size < 0 or size % ranks:
            raise ArgumentError.explained(
                "The size of a bias must be a multiple of the tensor-parallel size",
                where=type(self).__name__,
                received=f"size {size}, {ranks} ranks",
            )
        self.size = size
        self.local_size = size // ranks
        self.tensor_parallel = ranks > 1
        self._group = GroupRef(tensor_parallel_group if ranks > 1 else None)
        self.tensor_parallel_size = ranks
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(self.local_size, device=device, dtype=dtype))
        )
        self.reset_parameters()

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """Group over which the bias is sliced."""
        return self._group.group

    def reset_parameters(self) -> None:
        """Fills the bias with zeros."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        bias: Tensor | None = self.bias
        if bias is None:
            return input_
        if input_.shape[-1:] != (self.local_size,):
            self._refuse_input(input_.shape)
        if bias.dtype != input_.dtype:
            if input_.dtype not in COMPUTE_DTYPES:
                refuse_dtype(input_, self)
            bias = bias.to(input_.dtype)
        return input_ + bias

    def operand(self, x: Tensor, weight: Weight | None = None) -> Tensor | None:
        """The bias, checked, for a pass of a fusion that adds it; None where it was cleared.

        Args:
            x: what it is added to.
            weight: where it is added to ``x Wᵀ``, that W. The bias is cast to the dtype of x then,
                which is that of W unless W comes as codes.

        Raises:
            InputError: the bias is not as long as the rows that it is added to.
        """
        b: Tensor | None = self.bias
        if b is None:
            return None
        if weight is None:
            if x.shape[-1:] != b.shape:
                self._refuse_input(x.shape)
            return b
        if b.shape[0] != weight.shape[0]:
            self._refuse_input((*x.shape[:-1], weight.shape[0]))
        return b if b.dtype == x.dtype else b.to(x.dtype)

    def gradients(self, db: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """For each parameter its share of the gradient ``db`` (size,), if it is needed."""
        return (db,)

    def _refuse_input(self, shape: Sequence[int]) -> None:
        raise InputError.explained(
            "The last dimension of the input must be the size of the bias",
            where=f"{type(self).__name__}({self.extra_repr()})",
            received=f"shape {tuple(shape)}",
            remedy=f"Pass a tensor of shape (..., {self.local_size})",
        )

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        needs_dx, needs_db, _ = ctx.needs
        dx = grad_output if needs_dx else None
        if not needs_db:
            return dx, ()
        return dx, (bias_grad(grad_output) if needs_db[0] else None,)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        if self.bias is None:
            return input_
        return input_ + self.bias.to(input_.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}" + (", tensor_parallel=True" if self.tensor_parallel else "")

"""Learned absolute positions."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.context_parallel import refuse_counted_positions
from ..errors import InputError
from ..op import BasicOperation, OperationContext, OperationGrads
from ._dtypes import check_parameter_dtype
from ._numbers import check_sizes, is_one_of


class PositionEmbedding(BasicOperation):
    """Adds a learned row to every position: ``y[..., t, :] = x[..., t, :] + weight[t]``.

    Shapes: x and y ``(..., sequence, embedding_dim)``, weight ``(num_positions, embedding_dim)``.
    The output has the dtype of x, to which the weight is cast. ``dx = dy``; row t of the weight's
    gradient is the sum of dy over all places of position t. Saved: the positions, if given. The
    weight is initialized from the standard normal distribution, as in ``torch.nn.Embedding``.

    Source: Gehring et al., "Convolutional Sequence to Sequence Learning", 2017, arXiv 1705.03122;
    in BERT, GPT-2 and ViT.

    Args:
        num_positions: rows of the table.
        embedding_dim: length of a row.
        device: of the weight; None is torch's default.
        dtype: of the weight; None is torch's default.

    Keyword of a call (through ``op_kwargs``): ``positions``, an integer tensor ``(sequence,)`` or
    of the shape of x without its last dimension; None means 0, 1, 2, … A position outside of the
    table fails like an index of ``Embedding``.

    Raises:
        ArgumentError: if a size is negative, or ``dtype`` is not fp16, bf16, fp32 or fp64.
        InputError: in forward, if a shape or dtype is not as above, or there are more positions
            than rows.
        NotSupportedError: in forward, within torch's ``context_parallel``, without positions.
    """

    read_only: ClassVar[frozenset[str]] = frozenset({"num_positions", "embedding_dim"})

    class Saved(NamedTuple):
        positions: Tensor | None

    weight: nn.Parameter

    def __init__(
        self,
        num_positions: int,
        embedding_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_parameter_dtype(dtype, "PositionEmbedding")
        check_sizes("PositionEmbedding", num_positions=num_positions, embedding_dim=embedding_dim)
        self.num_positions = num_positions
        self.embedding_dim = embedding_dim
        self.weight = nn.Parameter(
            torch.empty(num_positions, embedding_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from the standard normal distribution."""
        nn.init.normal_(self.weight)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(positions))
        return self.reference(input_, positions=positions)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        (positions,) = ctx.saved_tensors
        dx = grad_output if ctx.needs.input else None
        if not ctx.needs.parameters[0]:
            return dx, (None,)
        if positions is not None:
            places = positions.expand(grad_output.shape[:-1])
            dw = torch.ops.aten.embedding_dense_backward.default(
                grad_output, places, self.num_positions, -1, False
            )
            return dx, (dw,)
        # A view would share the memory of dy, into which autograd may accumulate.
        summed = grad_output.flatten(0, -3).sum(0) if grad_output.dim() > 2 else grad_output
        unused = self.num_positions - summed.shape[0]
        return dx, (nn.functional.pad(summed, (0, 0, 0, unused)) if unused else summed.clone(),)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        positions: Tensor | None = kwargs.get("positions")
        self._check_input(input_, positions)
        if positions is None:
            refuse_counted_positions("PositionEmbedding")
            rows = self.weight[: input_.shape[-2]]
        else:
            rows = torch.embedding(self.weight, positions)
        return input_ + rows.to(input_.dtype)

    def _check_input(self, x: Tensor, positions: Tensor | None) -> None:
        invariant, received = "", f"input {tuple(x.shape)} of {x.dtype}"
        if x.dim() < 2 or x.shape[-1] != self.embedding_dim or not x.is_floating_point():
            invariant = f"The input must be floating point, (..., sequence, {self.embedding_dim})"
        elif positions is not None:
            fits = is_one_of(positions.shape, x.shape[-2:-1], x.shape[:-1])
            if positions.dtype not in (torch.int32, torch.int64) or not fits:
                invariant = "positions must be int32 or int64, (sequence,) or one for each row of x"
                received += f", positions {tuple(positions.shape)} of {positions.dtype}"
        elif x.shape[-2] > self.num_positions:
            invariant = "The sequence must not be longer than the table"
            received += f", num_positions={self.num_positions}"
        if invariant:
            raise InputError.explained(invariant, where="PositionEmbedding", received=received)

    def extra_repr(self) -> str:
        return f"{self.num_positions}, {self.embedding_dim}"

"""Table lookup."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, InputError, explain
from ..op import BasicOperation, OperationContext

__all__ = ["Embedding"]


class Embedding(BasicOperation):
    """Looks up rows of a table: ``y[..., :] = weight[x[...], :]``.

    Shapes: x ``(...)`` of int32 or int64, weight ``(num_embeddings, embedding_dim)``,
    y ``(..., embedding_dim)`` in the weight's dtype, also under autocast. The input has no
    gradient; row i of the weight's is the sum of dy over the places where x is i.
    The weight starts standard normal, as that of ``torch.nn.Embedding``. It may be tied to another
    operation's: ``linear.weight = embedding.weight``.

    Args:
        num_embeddings: rows of the table. An index outside of them fails inside torch: by an
            IndexError on a CPU, by a device-side assertion on a GPU.
        embedding_dim: length of a row.
        padding_idx: a row that gets no gradient and starts as zeros; negative counts from the end.
        device: of the weight; None is torch's default.
        dtype: of the weight; None is torch's default.

    Raises:
        ArgumentError: if a size is negative, or ``padding_idx`` is no row.
        InputError: in forward, if the input is not of an integer dtype above.
    """

    class Saved(NamedTuple):
        indices: Tensor

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_embeddings < 0 or embedding_dim < 0:
            raise ArgumentError(
                explain(
                    "Sizes must not be negative",
                    where="Embedding",
                    received=f"num_embeddings={num_embeddings}, embedding_dim={embedding_dim}",
                )
            )
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ArgumentError(
                    explain(
                        "padding_idx must be a row of the table",
                        where="Embedding",
                        received=f"padding_idx={padding_idx} of {num_embeddings} rows",
                    )
                )
            padding_idx %= num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from the standard normal distribution, then zeroes the padding row."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def op_forward(  # type: ignore[override]  # takes no keywords of its own
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(input_))
        return self.reference(input_)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[None, tuple[Tensor | None]]:
        if not ctx.needs.parameters[0]:
            return None, (None,)
        assert ctx.saved_tensors is not None
        (indices,) = ctx.saved_tensors
        padding = -1 if self.padding_idx is None else self.padding_idx
        grad_weight = torch.ops.aten.embedding_dense_backward(
            grad_output, indices, self.num_embeddings, padding, False
        )
        return None, (grad_weight,)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        if input_.dtype not in (torch.int64, torch.int32):
            raise InputError(
                explain(
                    "Indices must be int32 or int64",
                    where="Embedding",
                    received=str(input_.dtype),
                    remedy="Convert them with .long()",
                )
            )
        padding = -1 if self.padding_idx is None else self.padding_idx
        return torch.embedding(self.weight, input_, padding)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"

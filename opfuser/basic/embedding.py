"""Table lookup."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, InputError, explain
from ..op import BasicOperation, Dtypes, OperationContext

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

    read_only: ClassVar[frozenset[str]] = frozenset({"num_embeddings", "embedding_dim"})

    class Saved(NamedTuple):
        indices: Tensor

    class Settings(NamedTuple):
        padding_idx: int
        """-1 for none."""

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
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        (row,) = self.make_settings()
        self.padding_idx = None if padding_idx is None else row
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def make_settings(self) -> Embedding.Settings:
        padding_idx, rows = self.padding_idx, self.num_embeddings
        if padding_idx is None:
            return self.Settings(-1)
        if not -rows <= padding_idx < rows:
            raise ArgumentError(
                explain(
                    "padding_idx must be a row of the table",
                    where="Embedding",
                    received=f"padding_idx={padding_idx} of {rows} rows",
                )
            )
        return self.Settings(padding_idx % rows)

    def reset_parameters(self) -> None:
        """Draws the weight from the standard normal distribution, then zeroes the padding row."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.first_parameter

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(input_))
        return self._look_up(input_, *(ctx.settings or self.frozen_settings(ctx)))

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[None, tuple[Tensor | None]]:
        if not ctx.needs.parameters[0]:
            return None, (None,)
        assert ctx.saved_tensors is not None
        (indices,) = ctx.saved_tensors
        (padding,) = ctx.settings or self.frozen_settings(ctx)
        grad_weight = torch.ops.aten.embedding_dense_backward.default(
            grad_output, indices, self.num_embeddings, padding, False
        )
        return None, (grad_weight,)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self._look_up(input_, *self.make_settings())

    def _look_up(self, input_: Tensor, padding: int) -> Tensor:
        if input_.dtype not in (torch.int64, torch.int32):
            raise InputError(
                explain(
                    "Indices must be int32 or int64",
                    where="Embedding",
                    received=str(input_.dtype),
                    remedy="Convert them with .long()",
                )
            )
        return torch.embedding(self.weight, input_, padding)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"

"""Table lookup."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.collectives import (
    VocabularySlice,
    all_reduce,
    check_sequence_dim,
    gather,
    reduce_scatter,
    refuse_reference,
    slice_vocabulary,
)
from ..errors import ArgumentError, InputError
from ..op import BasicOperation, Dtypes, OperationContext, OperationGrads
from ._numbers import check_sizes


class Embedding(BasicOperation):
    """Looks up rows of a table: ``y[..., :] = weight[x[...], :]``.

    Shapes: x ``(...)`` of int32 or int64, weight ``(num_embeddings, embedding_dim)``, y ``(...,
    embedding_dim)`` in the weight's dtype, also under autocast. The input has no gradient; row i of
    the weight's is the sum of dy over the places where x is i. The weight is initialized from the
    standard normal distribution, as in ``torch.nn.Embedding``. It can be tied to another
    operation's weight: ``linear.weight = embedding.weight``.

    With ``tensor_parallel``, every rank holds a slice of the rows, cut as by ``torch.chunk``, and
    looks up the indices in it; the output is the sum over the ranks (Shoeybi et al., Megatron-LM,
    arXiv:1909.08053). All ranks get the same indices. With ``sequence_parallel`` too, each keeps a
    slice of that sum along ``sequence_dim`` (Korthikanti et al., arXiv:2205.05198).

    Args:
        num_embeddings: rows of the table. An index out of range fails inside torch: with an
            IndexError on a CPU, with a device-side assertion on a GPU.
        embedding_dim: length of a row.
        padding_idx: a row that gets no gradient and starts as zeros; negative counts from the end.
        device: of the weight; None is torch's default.
        dtype: of the weight; None is torch's default.
        tensor_parallel: distribute the rows over the ranks of the group.
        tensor_parallel_group: None is all ranks.
        sequence_parallel: with ``tensor_parallel``, slice the output.
        sequence_dim: along which dimension of the output.

    Raises:
        ArgumentError: if a size is negative, ``padding_idx`` is not a row, a rank would have no
            row, or ``sequence_parallel`` is set without ``tensor_parallel``.
        InputError: in forward, if the input is not of an integer dtype above, or cannot be sliced.
    """

    read_only: ClassVar[frozenset[str]] = frozenset(
        {"num_embeddings", "embedding_dim", "vocabulary", "sequence_parallel", "sequence_dim"}
    )

    class Saved(NamedTuple):
        indices: Tensor

    class Settings(NamedTuple):
        padding_idx: int
        """-1 for none."""

    weight: nn.Parameter

    def __init__(  # noqa: PLR0913 - by keyword
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
    ) -> None:
        super().__init__()
        check_sizes("Embedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if sequence_parallel and not tensor_parallel:
            raise ArgumentError.explained(
                "sequence_parallel needs tensor_parallel",
                where="Embedding",
                received="sequence_parallel=True, tensor_parallel=False",
            )
        check_sequence_dim(sequence_dim, "Embedding")
        own = None
        if tensor_parallel:
            own = slice_vocabulary(num_embeddings, tensor_parallel_group, "Embedding")
        self.vocabulary: VocabularySlice | None = own
        self.sequence_parallel = sequence_parallel and own is not None
        self.sequence_dim = sequence_dim
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        (row,) = self.make_settings()
        self.padding_idx = None if padding_idx is None else row
        rows = num_embeddings if own is None else own.rows
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def communicates(self) -> bool:  # type: ignore[override]
        return self.vocabulary is not None

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return self.vocabulary is None

    def make_settings(self) -> Embedding.Settings:
        padding_idx, rows = self.padding_idx, self.num_embeddings
        if padding_idx is None:
            return self.Settings(-1)
        if not -rows <= padding_idx < rows:
            raise ArgumentError.explained(
                "padding_idx must be a row of the table",
                where="Embedding",
                received=f"padding_idx={padding_idx} of {rows} rows",
            )
        return self.Settings(padding_idx % rows)

    def reset_parameters(self) -> None:
        """Draws the weight from the standard normal distribution, then zeroes the padding row."""
        nn.init.normal_(self.weight)
        own, row = self.vocabulary, self.padding_idx
        if row is not None and own is not None:
            row -= own.start
            row = row if 0 <= row < own.rows else None
        if row is not None:
            with torch.no_grad():
                self.weight[row].zero_()

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
        own = self.vocabulary
        if own is None:
            return self._look_up(input_, *self.frozen_settings(ctx))
        rows, foreign = _local_rows(self._checked(input_), own)
        part = torch.embedding(self.weight, rows.masked_fill(foreign, 0))
        part.masked_fill_(foreign.unsqueeze(-1), 0.0)  # a tensor that only this line refers to
        if self.sequence_parallel:
            return reduce_scatter(part, own.group, self.sequence_dim)
        return all_reduce(part, own.group, reuse=True)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        if not ctx.needs.parameters[0]:
            return None, (None,)
        (indices,) = ctx.saved_tensors
        (padding,) = self.frozen_settings(ctx)
        own = self.vocabulary
        if own is not None:
            return None, (self._slice_grad(grad_output, indices, padding, own),)
        grad_weight = torch.ops.aten.embedding_dense_backward.default(
            grad_output, indices, self.num_embeddings, padding, False
        )
        return None, (grad_weight,)

    def _slice_grad(
        self, dy: Tensor, indices: Tensor, padding: int, own: VocabularySlice
    ) -> Tensor:
        """Returns the gradient of this rank's rows."""
        if self.sequence_parallel:
            dy = gather(dy, own.group, self.sequence_dim)
        rows, foreign = _local_rows(indices, own)
        if padding >= 0:
            foreign = foreign | (indices == padding)
        # One row more takes what belongs to none here, and as a padding row nothing is added to it.
        rows = rows.masked_fill(foreign, own.rows)
        grad: Tensor = torch.ops.aten.embedding_dense_backward.default(
            dy, rows, own.rows + 1, own.rows, False
        )
        return grad[: own.rows]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        if self.vocabulary is not None:
            refuse_reference(self.vocabulary.group, "Embedding")
        return self._look_up(input_, *self.make_settings())

    def _look_up(self, input_: Tensor, padding: int) -> Tensor:
        return torch.embedding(self.weight, self._checked(input_), padding)

    def _checked(self, input_: Tensor) -> Tensor:
        if input_.dtype not in (torch.int64, torch.int32):
            raise InputError.explained(
                "Indices must be int32 or int64",
                where="Embedding",
                received=str(input_.dtype),
                remedy="Convert them with .long()",
            )
        return input_

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        own = self.vocabulary
        sliced = "" if own is None else f", rows {own.start} to {own.start + own.rows - 1}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{sliced}"


def _local_rows(indices: Tensor, own: VocabularySlice) -> tuple[Tensor, Tensor]:
    """Rows of this rank's slice, and which of the indices are rows of other ranks.

    An index that is a row of none stays outside of the slice, and fails in torch as it does where
    one rank holds the table.
    """
    rows = indices - own.start
    row_of_one = (indices >= 0) & (indices < own.classes)
    return rows, row_of_one & ((rows < 0) | (rows >= own.rows))

"""Table lookup that is added to the input."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..errors import InputError
from ..op import BasicOperation
from ._dtypes import check_parameter_dtype
from ._numbers import check_sizes


class AddEmbedding(BasicOperation):
    """Adds rows of a table by index: ``y[..., :] = x[..., :] + weight[indices[...]]``.

    Used for token types, segments or languages.

    Shapes: x and y ``(..., embedding_dim)``; indices, the extra input, ``(...)`` of int32 or int64;
    weight ``(num_embeddings, embedding_dim)``. The output has the dtype of x, to which the weight
    is cast. ``dx = dy``; row i of the weight's gradient is the sum of dy over the places where the
    index is i. The weight is initialized from the standard normal distribution, as in
    ``torch.nn.Embedding``.

    Source: the segment embeddings of Devlin et al., "BERT", 2018, arXiv 1810.04805.

    Args:
        num_embeddings: rows of the table. An index out of range fails as in ``Embedding``.
        embedding_dim: length of a row.
        device: of the weight; None is torch's default.
        dtype: of the weight; None is torch's default.

    Raises:
        ArgumentError: if a size is negative, or ``dtype`` is not fp16, bf16, fp32 or fp64.
        InputError: in forward, if a shape or dtype is not as above.
        OpKwargsError: in forward, if keywords are passed.
    """

    num_extra_inputs: int = 1
    takes_keywords = False
    read_only: ClassVar[frozenset[str]] = frozenset({"num_embeddings", "embedding_dim"})

    class Saved(NamedTuple):
        indices: Tensor

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_parameter_dtype(dtype, "AddEmbedding")
        check_sizes("AddEmbedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from the standard normal distribution."""
        nn.init.normal_(self.weight)

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **arguments: Unpack[ForwardArguments]
    ) -> ForwardResult:
        (ctx,), ((indices,),) = basic_op_ctxs, arguments["basic_op_extra_inputs"]
        assert indices is not None
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(indices))
        return self.reference(input_, indices), [()]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        (ctx,) = basic_op_ctxs
        (indices,) = ctx.saved_tensors
        dw = None
        if ctx.needs.parameters[0]:
            dw = torch.ops.aten.embedding_dense_backward.default(
                grad_output, indices, self.num_embeddings, -1, False
            )
        return (grad_output if ctx.needs.input else None), [(dw,)], [(None,)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        (indices,) = extra_inputs
        # One string: Dynamo of torch 2.11 cannot add two that hold sizes.
        received = (
            f"input {tuple(input_.shape)} of {input_.dtype}, "
            f"indices {tuple(indices.shape)} of {indices.dtype}"
        )
        invariant = ""
        if input_.shape[-1:] != (self.embedding_dim,) or not input_.is_floating_point():
            invariant = f"The input must be floating point, (..., {self.embedding_dim})"
        elif indices.shape != input_.shape[:-1] or indices.dtype not in (torch.int32, torch.int64):
            invariant = "Indices must be int32 or int64, one for each row of the input"
        if invariant:
            raise InputError.explained(invariant, where="AddEmbedding", received=received)
        return input_ + torch.embedding(self.weight, indices).to(input_.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"

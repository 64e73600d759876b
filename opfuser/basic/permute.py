"""Rows of tokens in the order of their experts."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..errors import ArgumentError, InputError
from ..kernels.row_map import copy_to_rows, sort_by_expert, sum_of_rows
from ..kernels.row_map_plain import inverse, picked, tokens
from ..op import BasicOperation, Dtypes


class Permute(BasicOperation):
    """Copies each token once for each of its experts, and sorts the copies by expert.

    ``rows[row_map[t, j]] = x[t]``, where rows of expert e come before those of e + 1, and those of
    one expert are in the order of tokens: the sort is stable. Backward adds the gradients of a
    token's rows, in fp32 or wider.

    Shapes: x ``(..., D)``; rows, the output, ``(T k, D)`` for T tokens of k experts each. Extra
    inputs: the experts' indices ``(..., k)``, integers from 0 to ``num_experts - 1``, and with
    ``weighted`` the weights ``(..., k)``, as :class:`TopKRouter` returns them. Extra outputs: the
    row map ``(..., k)``, which :class:`Unpermute` reads; the number of rows of each expert,
    ``(num_experts,)``, which :class:`GroupedLinear` reads; both int64; and with ``weighted`` the
    weight of each row, ``(T k,)``, with a gradient, as :class:`ScaledSwiGLU` takes it. Rows have
    the dtype of x, their weights that of the weights; either may be any.

    Saves the row map. No sum is atomic: results are bitwise reproducible. Nothing waits for a
    GPU: an index that is no expert's fails there.

    On a GPU: two launches for the row map, with the number of rows, one for rows and their weights,
    and one for both gradients.

    Source: Gale et al., "MegaBlocks", 2022; the names are those of Megatron Core.

    Args:
        num_experts: number of experts.
        weighted: whether it takes and returns weights.

    Raises:
        ArgumentError: ``num_experts`` is below one.
        InputError: in forward, if shapes do not go together or the indices are not int32 or int64;
            on a CPU also if one is no expert's.
        OpKwargsError: in forward, if it is given keywords.
    """

    kernels = ("Triton row map",)
    num_extra_inputs: int = 2
    num_extra_outputs: int = 3
    takes_keywords = False
    emits_groups: ClassVar[bool] = True
    read_only: ClassVar[frozenset[str]] = frozenset(
        {"weighted", "num_extra_inputs", "num_extra_outputs"}
    )

    class Saved(NamedTuple):
        row_map: Tensor

    class Settings(NamedTuple):
        num_experts: int

    def __init__(self, num_experts: int, *, weighted: bool = True) -> None:
        if not weighted:
            self.num_extra_inputs, self.num_extra_outputs = 1, 2
        super().__init__()
        self.num_experts = num_experts
        self.weighted = weighted
        self.make_settings()

    def make_settings(self) -> Permute.Settings:
        if self.num_experts < 1:
            raise ArgumentError.explained(
                "num_experts must be positive",
                where="Permute",
                received=f"num_experts={self.num_experts}",
            )
        return self.Settings(self.num_experts)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.input

    def extra_output_dtypes(self, dtypes: Dtypes) -> tuple[torch.dtype, ...]:
        return torch.int64, torch.int64, *dtypes.extra_inputs[1:]

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx = basic_op_ctxs[0]
        indices, weights = (*given["basic_op_extra_inputs"][0], None)[:2]
        assert indices is not None
        _check(input_, indices, weights)
        (num_experts,) = self.frozen_settings(ctx)
        row_map, split_sizes = sort_by_expert(indices, num_experts)
        quantizer = given["next_op_input_quantizer"]
        if quantizer is None:
            rows, row_weights = copy_to_rows(input_, row_map, weights)
        else:
            order = inverse(row_map)
            rows = quantizer.gathered(input_, tokens(order, indices.shape[-1]), split_sizes)
            row_weights = None if weights is None else weights.reshape(-1).index_select(0, order)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(row_map))
        if row_weights is None:
            return rows, [(row_map, split_sizes)]
        return rows, [(row_map, split_sizes, row_weights)]

    @staticmethod
    def recompute(x: Tensor, row_map: Tensor) -> Tensor:
        """The output of forward, for its input and the row map that it returned."""
        return copy_to_rows(x, row_map, None)[0]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        row_map, needs = ctx.saved_tensors[0], ctx.needs
        dx = d_weights = d_row_weights = None
        if self.weighted and needs.extra_inputs[1]:
            d_row_weights = (*basic_op_grad_extra_outputs[0], None, None, None)[2]
        if needs.input:
            dx, d_weights = sum_of_rows(grad_output, row_map, None, d_row_weights)
        else:
            d_weights = picked(d_row_weights, row_map)
        return dx, [()], [(None, d_weights) if self.weighted else (None,)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        indices = extra_inputs[0]
        flat, k = indices.reshape(-1), indices.shape[-1]
        slots_of = [(flat == e).nonzero().reshape(-1) for e in range(self.num_experts)]
        order = torch.cat(slots_of)
        rows = input_.reshape(-1, input_.shape[-1])[order // max(k, 1)]
        sizes = torch.tensor([len(own) for own in slots_of], device=flat.device)
        out = rows, order.argsort().view(indices.shape), sizes
        return (*out, extra_inputs[1].reshape(-1)[order]) if self.weighted else out

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}" + ("" if self.weighted else ", weighted=False")


def _check(x: Tensor, indices: Tensor, weights: Tensor | None) -> None:
    invariant = ""
    if not x.dim() or indices.dim() != x.dim() or indices.shape[:-1] != x.shape[:-1]:
        invariant = "The experts' indices must be (..., k) for an input (..., D)"
    elif indices.dtype not in (torch.int32, torch.int64):
        invariant = "The experts' indices must be int32 or int64"
    elif weights is not None and weights.shape != indices.shape:
        invariant = "The weights must have the shape of the experts' indices"
    if invariant:
        received = f"input {tuple(x.shape)}, indices {tuple(indices.shape)} of {indices.dtype}"
        if weights is not None:
            received += f", weights {tuple(weights.shape)}"
        raise InputError.explained(invariant, where="Permute", received=received)

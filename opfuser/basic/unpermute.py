"""The rows of each token, summed."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..context import BackwardResult, Contexts, ExtraTensors, ForwardArguments, ForwardResult
from ..errors import InputError, explain
from ..op import BasicOperation
from ._row_map import gather_sum, slots, tokens

__all__ = ["Unpermute"]


class Unpermute(BasicOperation):
    """Adds the rows of each token: the inverse of :class:`Permute`.

    ``y[t] = Σ_j w[t, j] rows[row_map[t, j]]``, added in fp32 or wider; without ``weighted``, w is
    one. ``d rows[r] = w dy[t]`` and ``dw[t, j] = dy[t] · rows[row_map[t, j]]``.

    Shapes: rows ``(R, D)``. Extra inputs: the row map ``(..., k)``, as :class:`Permute` returns it,
    and with ``weighted`` the weights ``(..., k)``, which are rounded to the rows' dtype. y
    ``(..., D)``.

    Saves the row map, and with weights the rows. Weights that scale the rows before the second
    linear operation of an expert (:class:`ScaledSwiGLU`) save those R x D elements: it is linear.
    Both passes only gather: results are bitwise reproducible.

    Args:
        weighted: whether it takes weights.

    Raises:
        InputError: in forward, if shapes do not go together or the map is not int32 or int64.
        OpKwargsError: in forward, if it is given keywords.
    """

    num_extra_inputs: int = 1
    read_only: ClassVar[frozenset[str]] = frozenset({"weighted", "num_extra_inputs"})

    class Saved(NamedTuple):
        row_map: Tensor
        rows: Tensor | None
        weights: Tensor | None

    def __init__(self, *, weighted: bool = False) -> None:
        if weighted:
            self.num_extra_inputs = 2
        super().__init__()
        self.weighted = weighted

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        if given["basic_op_kwargs"][0]:
            self.refuse_keywords(given["basic_op_kwargs"][0])
        ctx = basic_op_ctxs[0]
        row_map, weights = (*given["basic_op_extra_inputs"][0], None)[:2]
        assert row_map is not None
        _check(input_, row_map, weights)
        if ctx.requires_grad:
            needs_dw = self.weighted and ctx.needs.extra_inputs[1]
            rows = input_ if needs_dw else None
            kept = weights if needs_dw or ctx.needs.input else None
            ctx.save_for_backward(*self.Saved(row_map, rows, kept))
        return gather_sum(input_.contiguous(), row_map, weights), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        row_map, rows, weights = ctx.saved_tensors
        order = slots(row_map)
        flat = grad_output.reshape(-1, grad_output.shape[-1])
        dy = flat.index_select(0, tokens(order, row_map.shape[-1]))
        if not self.weighted:
            return (dy if ctx.needs.input else None), [()], [(None,)]
        dx = dw = None
        if ctx.needs.extra_inputs[1]:
            wide = torch.promote_types(rows.dtype, torch.float32)
            of_rows = torch.linalg.vecdot(dy.to(wide), rows.to(wide))
            dw = of_rows.to(weights.dtype).index_select(0, row_map.reshape(-1))
            dw = dw.view(row_map.shape)
        if ctx.needs.input:
            w = weights.reshape(-1).to(dy.dtype).index_select(0, order)
            dx = dy * w.unsqueeze(-1)
        return dx, [()], [(None, dw)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        row_map, weights = (*extra_inputs, None)[:2]
        assert row_map is not None
        _check(input_, row_map, weights)  # a GPU would stop at rows that are not there
        rows = input_[row_map]
        return (rows if weights is None else rows * weights.to(rows.dtype).unsqueeze(-1)).sum(-2)

    def extra_repr(self) -> str:
        return "weighted=True" if self.weighted else ""


def _check(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> None:
    invariant = ""
    if rows.dim() != 2 or not row_map.dim() or row_map.numel() != rows.shape[0]:
        invariant = "The row map must have one entry for each row of an input (R, D)"
    elif row_map.dtype not in (torch.int32, torch.int64):
        invariant = "The row map must be int32 or int64"
    elif weights is not None and weights.shape != row_map.shape:
        invariant = "The weights must have the shape of the row map"
    if invariant:
        received = f"input {tuple(rows.shape)}, row map {tuple(row_map.shape)} of {row_map.dtype}"
        if weights is not None:
            received += f", weights {tuple(weights.shape)}"
        raise InputError(explain(invariant, where="Unpermute", received=received))

"""The rows of each token, summed."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..errors import InputError
from ..kernels.row_map import copy_to_rows, sum_of_rows, sum_of_rows_grads
from ..op import BasicOperation


class Unpermute(BasicOperation):
    """Adds the rows of each token: the inverse of :class:`Permute`.

    ``y[t] = Σ_j w[t, j] rows[row_map[t, j]]``, added in fp32 or wider; without ``weighted``, w is
    one. ``d rows[r] = w dy[t]`` and ``dw[t, j] = dy[t] · rows[row_map[t, j]]``.

    Shapes: rows ``(R, D)``. Extra inputs: the row map ``(..., k)``, as :class:`Permute` returns it,
    and with ``weighted`` the weights ``(..., k)``, which are rounded to the rows' dtype. y
    ``(..., D)``.

    Saves the row map, and with weights the rows. Weights that scale the rows before the second
    linear operation of an expert (:class:`ScaledSwiGLU`) save those R x D elements: it is linear.
    No sum is atomic: results are bitwise reproducible. Either pass is one launch on a GPU.

    Args:
        weighted: whether it takes weights.

    Raises:
        InputError: in forward, if shapes do not go together or the map is not int32 or int64.
        OpKwargsError: in forward, if it is given keywords.
    """

    kernels = ("Triton row map",)
    num_extra_inputs: int = 1
    takes_keywords = False
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
        ctx = basic_op_ctxs[0]
        row_map, weights = (*given["basic_op_extra_inputs"][0], None)[:2]
        assert row_map is not None
        _check(input_, row_map, weights)
        if ctx.requires_grad:
            needs_dw = self.weighted and ctx.needs.extra_inputs[1]
            rows = input_ if needs_dw else None
            kept = weights if needs_dw or ctx.needs.input else None
            ctx.save_for_backward(*self.Saved(row_map, rows, kept))
        return sum_of_rows(input_, row_map, weights, None)[0], [()]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        row_map, rows, weights = ctx.saved_tensors
        if not self.weighted:
            dx = copy_to_rows(grad_output, row_map, None)[0] if ctx.needs.input else None
            return dx, [()], [(None,)]
        of_weights = rows if ctx.needs.extra_inputs[1] else None
        dx, dw = sum_of_rows_grads(grad_output, row_map, weights, of_weights, ctx.needs.input)
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
        raise InputError.explained(invariant, where="Unpermute", received=received)

"""Products and sums of groups of rows as operators that no tracer looks into.

Programs of ``torch.export`` call them, so that ``import opfuser`` loads this module. What computes
them is loaded by their first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .later import load


@torch.library.custom_op(
    "opfuser::grouped_sum", mutates_args=(), schema="(Tensor x, Tensor split_sizes) -> Tensor"
)
def grouped_sum(x: Tensor, split_sizes: Tensor) -> Tensor:
    """The sum of the rows of each group, (G, N)."""
    total: Tensor = _groups(x, split_sizes).sum(x)
    return total


@grouped_sum.register_fake
def _(x: Tensor, split_sizes: Tensor) -> Tensor:
    return x.new_empty(split_sizes.shape[0], x.shape[1])


@torch.library.custom_op(
    "opfuser::grouped_mm",
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor split_sizes, bool transpose) -> Tensor",
)
def grouped_mm(x: Tensor, weights: list[Tensor], split_sizes: Tensor, transpose: bool) -> Tensor:
    """The rows of each group times its matrix, or the transpose of that."""
    name = "grouped_forward" if transpose else "grouped_dgrad"
    product: Tensor = load(f"opfuser.gemm.grouped:{name}")(x, weights, _groups(x, split_sizes))
    return product


@grouped_mm.register_fake
def _(x: Tensor, weights: list[Tensor], split_sizes: Tensor, transpose: bool) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0 if transpose else 1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, split_sizes, ctx.transpose = inputs
    ctx.save_for_backward(x, split_sizes, *weights)


def _mm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, list[Tensor] | None, None, None]:
    """For programs of torch.export; a sequence has the gradients from its operations."""
    x, split_sizes, *weights = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = grouped_mm(dy, weights, split_sizes, not ctx.transpose)
    if any(ctx.needs_input_grad[1]):
        factors = (dy, x) if ctx.transpose else (x, dy)
        dw = list(grouped_wgrad(*factors, split_sizes).unbind(0))
    return dx, dw, None, None


grouped_mm.register_autograd(_mm_backward, setup_context=_keep)


@torch.library.custom_op(
    "opfuser::grouped_wgrad",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor split_sizes) -> Tensor",
)
def grouped_wgrad(dy: Tensor, x: Tensor, split_sizes: Tensor) -> Tensor:
    """``dyᵀ x`` of the rows of each group, (G, N, K)."""
    multiply = load("opfuser.gemm.grouped:grouped_wgrad")
    dw: Tensor = multiply(dy, x, _groups(x, split_sizes), stacked=True)
    return dw


@grouped_wgrad.register_fake
def _(dy: Tensor, x: Tensor, split_sizes: Tensor) -> Tensor:
    return x.new_empty(split_sizes.shape[0], dy.shape[1], x.shape[1])


def _groups(x: Tensor, split_sizes: Tensor) -> Any:
    return load("opfuser.gemm.row_groups:groups_on_host")(split_sizes, x)

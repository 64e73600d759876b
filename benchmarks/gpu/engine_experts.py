"""Experts of Transformer Engine: its router, its permutation, and its grouped operations."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.peers import attribute
from benchmarks.gpu.problem import Function


class _Written(torch.autograd.Function):
    """Hands on y; the gradients of parameters are what the backward before it writes elsewhere."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None, *ctx.gradients


def engine_layer(source: Any, top_k: int) -> Function:
    """The layer with the parameters of ``source``.

    Its operations have a weight for each expert. Here these are parts of one tensor, and so are the
    gradients, which its GEMMs write (``main_grad``): nothing is copied for the comparison.
    """
    ops = importlib.import_module("transformer_engine.pytorch.ops")
    route = attribute("transformer_engine.pytorch.router:fused_topk_with_score_function")
    permute = attribute("transformer_engine.pytorch.permutation:moe_permute_with_probs")
    unpermute = attribute("transformer_engine.pytorch.permutation:moe_unpermute")
    wholes = source.gate_up, source.down
    gradients = [torch.zeros_like(whole) for whole in wholes]
    linear = []
    for whole, gradient in zip(wholes, gradients):
        count, out_features, in_features = whole.shape
        how: Any = {"device": whole.device, "dtype": whole.dtype, "bias": False}
        op = ops.GroupedLinear(
            count, in_features, out_features, accumulate_into_main_grad=True, **how
        )
        for n, (part, written) in enumerate(zip(whole.detach(), gradient)):
            weight: Any = nn.Parameter(part)
            weight.main_grad, weight.overwrite_main_grad = written, True
            setattr(op, f"weight{n}", weight)
        linear.append(op)
    experts = ops.Sequential(linear[0], ops.ScaledSwiGLU(), linear[1])

    def layer(x: Tensor) -> Any:
        logits = F.linear(x, source.router).float()
        weights, routed = route(logits, top_k, False, None, None, None, "softmax", None)
        rows, scales, row_map = permute(x, weights, routed, len(x) * top_k)
        sizes = routed.sum(0)
        y = unpermute(experts(rows, sizes, scales, sizes), row_map, restore_shape=x.shape)
        return _Written.apply(y, gradients, *wholes)

    return layer

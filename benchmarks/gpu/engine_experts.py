"""Experts of Transformer Engine: its permutation and its grouped operations."""

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
    """The layer with the parameters of ``source``, behind a router of torch's.

    Its own router picks other experts among equal logits, of which bf16 has many.

    Its operations have a weight for each expert. Here these are parts of one tensor, and so are the
    gradients, which its GEMMs write (``main_grad``): nothing is copied for the comparison.
    """
    ops = importlib.import_module("transformer_engine.pytorch.ops")
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
        probabilities = F.linear(x, source.router).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        weights = torch.zeros_like(probabilities).scatter(1, chosen, weights)
        routed = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, chosen, True)
        rows, scales, row_map = permute(x, weights, routed, len(x) * top_k)
        sizes = routed.sum(0)
        y = unpermute(experts(rows, sizes, scales, sizes), row_map, restore_shape=x.shape)
        return _Written.apply(y, gradients, *wholes)

    return layer

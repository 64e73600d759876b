"""Attention as the formula says, with all weights at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.philox import draw_seed
from ..kernels.pointwise_plain import rescale
from .blockwise import hidden_keys, survivors
from .call import Call, Heads


def plain_attention(x: Heads, call: Call) -> Tensor:
    """The output (B, H, S, V) in plain differentiable torch; as many key heads as query heads."""
    q, k, v = x
    rows, keys = slice(0, q.shape[2]), slice(0, k.shape[2])
    scores = q @ k.transpose(2, 3) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.slopes is not None:
        at, other = (torch.arange(s.stop, device=q.device) for s in (rows, keys))
        at = at + (keys.stop - rows.stop if call.start is None else call.start)
        slopes = call.slopes.to(scores.dtype)[:, None, None]
        scores = scores - slopes * (at[:, None] - other).abs()
    if call.bias is not None:
        scores = scores + call.bias.to(scores.dtype)
    hidden = hidden_keys(x, call, rows, keys)
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + call.mask.to(scores.dtype)
    elif call.mask is not None:
        hidden = ~call.mask if hidden is None else hidden | ~call.mask
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    sinks = call.sinks
    if sinks is None:
        sinks = torch.full(q.shape[1:2], -torch.inf, dtype=scores.dtype, device=q.device)
    logits = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, logits], -1)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    p = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)[..., :-1]
    if call.dropout_p:
        kept = survivors(x, call.dropout_p, draw_seed(q), rows, keys)
        p = p * kept * rescale(call.dropout_p)
    return p @ v

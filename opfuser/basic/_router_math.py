"""The arithmetic of a router: scores, the experts chosen, weights and gradients.

Symbols: E experts, k of them for each token. Everything is in fp32, or fp64 for fp64 logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "RouterSettings",
    "choice",
    "count_tokens",
    "masked",
    "probabilities_of",
    "quotient_backward",
    "scores_of",
    "weights_backward",
    "weights_of",
    "widened",
]

# Keeps the sum of scores that are all 0 from dividing by 0.
_TINY = 1e-20


class RouterSettings(NamedTuple):
    num_experts: int
    top_k: int
    score_function: str
    norm_topk_prob: bool
    scaling_factor: float
    num_groups: int
    top_k_groups: int


def widened(x: Tensor) -> Tensor:
    """``x`` in fp32, or fp64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scores_of(logits: Tensor, function: str) -> Tensor:
    """The score of each expert, (..., E)."""
    return logits.softmax(-1) if function == "softmax" else logits.sigmoid()


def choice(scores: Tensor, bias: Tensor | None, settings: RouterSettings) -> Tensor:
    """The indices of the experts with the largest scores, once these are corrected: (..., k)."""
    corrected = scores if bias is None else scores + bias.to(scores.dtype)
    if settings.num_groups > 1:
        grouped = corrected.unflatten(-1, (settings.num_groups, -1))
        best = grouped.topk(2, -1).values.sum(-1)
        kept = best.topk(settings.top_k_groups, -1).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
        corrected = grouped.masked_fill(left_out.unsqueeze(-1), -math.inf).flatten(-2)
    return corrected.topk(settings.top_k, -1).indices


def weights_of(chosen: Tensor, settings: RouterSettings) -> Tensor:
    """The weights, given the scores of the experts chosen."""
    if settings.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + _TINY)
    return chosen if settings.scaling_factor == 1 else chosen * settings.scaling_factor


def weights_backward(dw: Tensor, chosen: Tensor, settings: RouterSettings) -> Tensor:
    """The gradient of the scores of the experts chosen."""
    dw = dw * settings.scaling_factor
    if not settings.norm_topk_prob:
        return dw
    total = chosen.sum(-1, keepdim=True) + _TINY
    return quotient_backward(dw, chosen / total, total)


def quotient_backward(dq: Tensor, q: Tensor, total: Tensor) -> Tensor:
    """The gradient of s, for ``q = s / Σ s`` with the sum in ``total``."""
    return (dq - (dq * q).sum(-1, keepdim=True)) / total


def probabilities_of(scores: Tensor, function: str) -> tuple[Tensor | None, Tensor]:
    """What adds up to one over the experts, and the sum that it was divided by, if it was."""
    if function == "softmax":
        return None, scores
    total = scores.sum(-1, keepdim=True) + _TINY
    return total, scores / total


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` of the tokens that count, and zeros for the others."""
    return x if mask is None else x * mask.unsqueeze(-1)


def count_tokens(logits: Tensor, mask: Tensor | None) -> int | Tensor:
    """The number of tokens that count; 1 if there are none."""
    if mask is not None:
        return mask.sum(dtype=logits.dtype).clamp(min=1)
    return max(logits.numel() // logits.shape[-1], 1)

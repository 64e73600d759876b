"""The arithmetic of a router: scores, the experts chosen, weights, statistics and the gradient.

Symbols: T tokens, E experts, k of them for each token. Logits are (..., E). Everything is in fp32,
or fp64 for fp64 logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_internals import softmax_backward
from .row_map_plain import counts

# Keeps the sum of scores that are all 0 from dividing by 0.
_TINY = 1e-20


class RouterSettings(NamedTuple):
    """As the arguments of :class:`opfuser.TopKRouter`."""

    num_experts: int
    top_k: int
    score_function: str
    norm_topk_prob: bool
    scaling_factor: float
    num_groups: int
    top_k_groups: int


class RouterLosses(NamedTuple):
    """Which are wanted: the load-balancing loss, the z-loss, and the terms of the first."""

    aux: bool
    z: bool
    terms: bool


class Routing(NamedTuple):
    """What a router returns, and what its backward reads.

    Attributes:
        weights, indices: of the experts of each token, (..., k).
        tokens: of each expert, (E,), int64.
        aux, z, terms: (), () and (2, E), as far as they are wanted.
        fractions: tokens of each expert over all, (E,); None if neither aux nor terms is wanted.
        number: of the tokens that the mask counts, at least 1, (); None without a mask.
    """

    weights: Tensor
    indices: Tensor
    tokens: Tensor
    aux: Tensor | None
    z: Tensor | None
    terms: Tensor | None
    fractions: Tensor | None
    number: Tensor | None


class LossGrads(NamedTuple):
    """Gradients of the losses, None for none."""

    aux: Tensor | None
    z: Tensor | None
    terms: Tensor | None


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


def forward(
    logits: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    settings: RouterSettings,
    losses: RouterLosses,
) -> Routing:
    """Routes tokens.

    Args:
        logits: (..., E).
        bias: added to the scores by which experts are chosen, (E,), or None.
        mask: (...), bool: which tokens the losses are those of; None: all.
        settings: of the router.
        losses: that are wanted.
    """
    x = widened(logits)
    scores = scores_of(x, settings.score_function)
    with torch.no_grad():
        indices = choice(scores, bias, settings)
    weights = scores.gather(-1, indices)
    if settings.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    if settings.scaling_factor != 1:
        weights = weights * settings.scaling_factor
    experts, number = settings.num_experts, _count(x, mask)
    tokens = counts(indices, experts)
    aux = z = terms = fractions = None
    if losses.aux or losses.terms:
        counted = tokens if mask is None else counts(indices, experts, mask)
        _, shares = _shares(scores, settings)
        fractions = counted.to(scores.dtype) / number
        means = _masked(shares, mask).reshape(-1, experts).sum(0) / number
        aux = (fractions * means).sum() * experts if losses.aux else None
        terms = torch.stack([fractions, means]) if losses.terms else None
    if losses.z:
        z = _masked(x.logsumexp(-1, keepdim=True), mask).square().sum() / number
    kept = number if isinstance(number, Tensor) else None
    return Routing(weights, indices, tokens, aux, z, terms, fractions, kept)


def backward(
    logits: Tensor,
    dweights: Tensor,
    routing: tuple[Tensor, Tensor | None, Tensor | None],
    mask: Tensor | None,
    grads: LossGrads,
    settings: RouterSettings,
) -> Tensor:
    """The gradient of the logits; ``routing`` is indices, fractions and number of a Routing."""
    indices, fractions, kept = routing
    x = widened(logits)
    number = _count(x, mask) if kept is None else kept
    scores = scores_of(x, settings.score_function)
    dw = dweights.to(scores.dtype) * settings.scaling_factor
    if settings.norm_topk_prob:
        chosen = scores.gather(-1, indices)
        total = chosen.sum(-1, keepdim=True) + _TINY
        dw = _quotient_backward(dw, chosen / total, total)
    ds = torch.zeros_like(scores).scatter_(-1, indices, dw)
    d_means = None if grads.terms is None else grads.terms[1]
    if grads.aux is not None:
        assert fractions is not None
        of_aux = grads.aux * settings.num_experts * fractions
        d_means = of_aux if d_means is None else d_means + of_aux
    if d_means is not None:
        dp = d_means / number
        divisor, shares = _shares(scores, settings)
        ds += _masked(dp if divisor is None else _quotient_backward(dp, shares, divisor), mask)
    if settings.score_function == "softmax":
        dx = softmax_backward(ds, scores, -1, scores.dtype)
    else:
        dx = ds * scores * (1 - scores)
    if grads.z is not None:
        lse = x.logsumexp(-1, keepdim=True)
        dx += grads.z * (2 / number) * _masked(lse * (x - lse).exp(), mask)
    return dx.to(logits.dtype)


def _quotient_backward(dq: Tensor, q: Tensor, total: Tensor) -> Tensor:
    """The gradient of s, for ``q = s / Σ s`` with the sum in ``total``."""
    return (dq - (dq * q).sum(-1, keepdim=True)) / total


def _shares(scores: Tensor, settings: RouterSettings) -> tuple[Tensor | None, Tensor]:
    """What adds up to one over the experts, and the sum that it was divided by, if it was."""
    if settings.score_function == "softmax":
        return None, scores
    total = scores.sum(-1, keepdim=True) + _TINY
    return total, scores / total


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` of the tokens that count, and zeros for the others, even where ``x`` is not finite."""
    return x if mask is None else torch.where(mask.unsqueeze(-1), x, 0)


def _count(logits: Tensor, mask: Tensor | None) -> int | Tensor:
    """The number of tokens that count; 1 if there are none."""
    if mask is not None:
        return mask.sum(dtype=logits.dtype).clamp(min=1)
    return max(logits.numel() // logits.shape[-1], 1)

"""Caches of keys and values that sequences extend while gradients are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import NotSupportedError


class WithoutGradients:
    """A cache whose kept keys and values are no part of the graph that made them, and say so.

    A sequence differentiates its attention as a whole, so that no gradient of keys that a cache
    returned later reaches it. Backward through them raises, in place of leaving that out.

    Args:
        cache: that is extended.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def kept(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the cache is to keep them."""
        with torch.enable_grad():
            leaf = k.new_zeros((), requires_grad=True)
            keep: Any = _Kept.apply
            return keep(k.detach(), leaf), keep(v.detach(), leaf)

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Appends keys and values to a layer, and returns all, as constants."""
        with torch.enable_grad():
            keys, values = self.cache.update(*self.kept(k, v), layer)
        return keys.detach(), values.detach()


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Tensor, leaf: Tensor) -> Tensor:
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        raise NotSupportedError.explained(
            "Gradients do not flow into keys and values that a cache keeps of another call",
            where="a model to which opfuser.apply was applied",
            received="a backward pass through them",
            remedy="Pass use_cache=False, compute both calls without gradients, or call "
            "opfuser.revert(model)",
        )

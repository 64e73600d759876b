"""Which additive masks kernels of attention have no exact gradients for."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..runtime.tracing import stands_in

# Weights are off by 2^-24 of it, as the log-sum-exp of a row is kept in fp32.
_LOWEST = -128.0

_Known = tuple["weakref.ref[Tensor]", int, bool]
# Layers are given one mask. Of each, what was found out.
_known: dict[tuple[int, bool], _Known] = {}
_KNOWN_AT_MOST = 16


def hides_queries(mask: Tensor, strictly: bool = False) -> bool:
    """Whether an additive mask hides every key of some query, by numbers far below 0.

    Strictly, whether it may do so beside others: whether a bool mask hides every key of some query,
    which stands for such a number, or one of numbers hides any.

    The scores of such a row are lost in the sum with its mask, and torch's softmax is that of what
    rounding leaves. Kernels, torch's among them, recompute it in backward from the log-sum-exp of
    the row, which is rounded as well: gradients are wrong by as many times as there are keys. bool
    masks are not affected.

    The host reads the mask, once for all layers that are given the same; while a CUDA graph is
    captured it cannot, and the answer is True.
    """
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        return False
    if not mask.numel() or mask.is_meta or stands_in(mask):
        return False
    if mask.dtype == torch.bool and not strictly:
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    if mask.is_inference():  # has no version
        return _reads(mask, strictly)
    key = id(mask), strictly
    ref, version, found = _known.get(key, (None, 0, False))
    if ref is None or ref() is not mask or version != mask._version:
        found = _reads(mask, strictly)
        if len(_known) >= _KNOWN_AT_MOST:
            _known.clear()
        _known[key] = weakref.ref(mask), mask._version, found
    return found


def _reads(mask: Tensor, strictly: bool) -> bool:
    mask = mask.detach()
    if mask.dtype == torch.bool:
        return not mask.any(-1).all()
    return bool(((mask if strictly else mask.amax(-1)) < _LOWEST).any())

"""A stand-in for torch's operators of cuDNN: their arguments, computed in plain torch.

It refuses what cuDNN is not to be asked for, and is worse where nothing may depend on it: queries
that see no key have an output of NaN, and weights in backward that are finite and wrong.
"""

# ruff: noqa: PLR0917  # the signatures are torch's

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_HIDDEN = -60000.0  # above what is added for keys that a mask hides


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> None:
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    assert k.shape == (batch, k.shape[1], keys, size)
    assert v.shape[:3] == k.shape[:3]
    assert heads % k.shape[1] == 0
    assert not causal or queries == keys, "it counts causality from the first key"
    if bias is not None:
        assert bias.dtype == q.dtype
        assert bias.shape == (batch, bias.shape[1], queries, keys)
        assert bias.shape[1] in (1, heads)
        assert bias.stride(3) == 1 or keys == 1
        assert bias.isfinite().all()


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    s = scale * q.to(_wide(q)) @ _repeated(k, q).mT
    s = s if bias is None else s + bias
    hidden = torch.ones_like(s, dtype=torch.bool).triu(1)
    return s.masked_fill(hidden, -torch.inf) if causal else s


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _repeated(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values, one for each head of queries."""
    return t.to(_wide(t)).repeat_interleave(q.shape[1] // t.shape[1], 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float,
) -> Any:  # fmt: skip
    assert (compute_log_sumexp, dropout_p, return_debug_mask) == (True, 0.0, False)
    _check(q, k, v, attn_bias, is_causal)
    s = _scores(q, k, attn_bias, is_causal, scale)
    y = s.softmax(-1) @ _repeated(v, q)
    y = y.masked_fill(s.amax(-1, keepdim=True) < _HIDDEN, torch.nan).to(q.dtype)
    seed, offset = torch.zeros(2, dtype=torch.int64)
    lengths = q.shape[2], k.shape[2]
    return y, s.logsumexp(-1, keepdim=True), None, None, *lengths, seed, offset, None


def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, seed: Tensor,
    offset: Tensor, attn_bias: Tensor | None, cum_seq_q: None, cum_seq_k: None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert (seed.dim(), offset.dim(), cum_seq_q, cum_seq_k, dropout_p) == (0, 0, None, None, 0.0)
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    assert dy.shape == y.shape
    _check(q, k, v, attn_bias, is_causal)
    s, groups = _scores(q, k, attn_bias, is_causal, scale), (k.shape[1], -1)
    p = torch.exp(s - logsumexp)
    p = torch.where(s.amax(-1, keepdim=True) < _HIDDEN, 7.0, p)
    dy = dy.to(p.dtype)
    dp = dy @ _repeated(v, q).mT
    ds = scale * p * (dp - (dy * y).sum(-1, keepdim=True))
    dk, dv = [t.unflatten(1, groups).sum(2) for t in (ds.mT @ q.to(_wide(q)), p.mT @ dy)]
    return (ds @ _repeated(k, q)).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@contextmanager
def stand_in() -> Iterator[list[Tensor | None]]:
    """Inside, torch's operators of cuDNN have these kernels on a CPU; yields what they add."""
    name, added = "_scaled_dot_product_cudnn_attention", []

    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *given: Any, **how: Any
    ) -> Any:
        added.append(bias)
        return _forward(q, k, v, bias, *given, **how)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, forward, "CPU")
        library.impl(f"{name}_backward", _backward, "CPU")
        yield added

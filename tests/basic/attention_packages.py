"""A stand-in for flash-attn: its signatures, computed in plain torch.

It shares nothing with the adapter: rows are (B, S, H, D), windows are numbers of keys to the left
and to the right of the diagonal that ends at the last query and key. What an adapter must not ask
for, it refuses.
"""

# ruff: noqa: PLR0917  # the signatures are those of the package

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from opfuser.attention import blockwise, choice, flash_attn
from opfuser.runtime import libraries


class Score(NamedTuple):
    """What a package computes of queries and keys."""

    scale: float
    window: tuple[int, int]
    softcap: float = 0.0
    slopes: Tensor | None = None
    ends: Tensor | None = None

    def of(self, q: Tensor, k: Tensor) -> Tensor:
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        s = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        j = torch.arange(k.shape[1])
        if self.slopes is not None:
            assert self.slopes.dtype == torch.promote_types(q.dtype, torch.float32)
            s = s - self.slopes.to(s.dtype)[:, None, None] * (i - j).abs()
        left, right = self.window
        seen = torch.ones_like(i - j, dtype=torch.bool)
        seen &= (i - j <= left) if left >= 0 else True
        seen &= (j - i <= right) if right >= 0 else True
        if self.ends is not None:
            own = torch.bucketize(j, self.ends, right=True)
            seen &= own[:, None] == own
        return s.masked_fill(~seen, -torch.inf)


def attended(score: Score, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = score.of(q, k)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    blind = (s == -torch.inf).all(-1)  # which see no key: 0, whose log-sum-exp is +inf there
    p = s.softmax(-1).masked_fill(blind[..., None], 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), s.logsumexp(-1).masked_fill(blind, torch.inf)


def differentiated(
    score: Score, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As a kernel does: of the output and the log-sum-exp that it is given."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        s = score.of(*leaves)
    p = torch.exp(s.detach() - logsumexp[..., None])
    wide = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    dp = torch.einsum("bihd,bjhd->bhij", dy, wide)
    delta = (dy * y).sum(-1).transpose(1, 2)[..., None]
    dq, dk = torch.autograd.grad(s, leaves, p * (dp - delta))
    dv = torch.einsum("bhij,bihd->bjhd", p, dy)
    return dq, dk, dv.unflatten(2, (v.shape[2], -1)).sum(3)


def longest_of(ends: Tensor) -> int:
    return int(ends.diff().max())


def flash_window(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    return (window[0], 0) if causal else window


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    assert (dropout_p, return_attn_probs) == (0.0, True)
    assert softmax_scale is not None
    window = flash_window(causal, window_size)
    return *attended(Score(softmax_scale, window, softcap, alibi_slopes), q, k, v), None


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    assert q.dim() == 3
    assert max_seqlen_q == max_seqlen_k == longest_of(cu_seqlens_q)
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert softmax_scale is not None
    score = Score(softmax_scale, flash_window(causal, window_size), softcap, alibi_slopes)
    y, logsumexp = attended(score._replace(ends=cu_seqlens_q), q[None], k[None], v[None])
    return y[0], logsumexp[0], None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
    dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    window = flash_window(causal, (window_size_left, window_size_right))
    score = Score(softmax_scale, window, softcap, alibi_slopes)
    grads = differentiated(score, dout, q, k, v, out, softmax_lse)
    for given, grad in zip((dq, dk, dv), grads):
        given.copy_(grad)
    return softmax_lse


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
    dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool, rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    assert max_seqlen_q == max_seqlen_k == longest_of(cu_seqlens_q)
    window = flash_window(causal, (window_size_left, window_size_right))
    score = Score(softmax_scale, window, softcap, alibi_slopes, cu_seqlens_q)
    rows = [t[None] for t in (dout, q, k, v, out, softmax_lse)]
    for given, grad in zip((dq, dk, dv), differentiated(score, *rows)):
        given.copy_(grad[0])
    return softmax_lse


FLASH_ATTN = (
    flash_attn_func, flash_attn_varlen_func, _flash_attn_backward, _flash_attn_varlen_backward
)  # fmt: skip


MODULE = "flash_attn.flash_attn_interface"


def few_queries(monkeypatch: pytest.MonkeyPatch, scores: int = 1) -> None:
    """Plain torch computes attention with as many queries at a time as have so many scores.

    Millions, otherwise, and at least 128 queries: no call of a test has as many.
    """
    monkeypatch.setattr(blockwise, "_FEWEST", 1)
    monkeypatch.setattr(blockwise, "_SCORES", scores)


def forget() -> None:
    """What was found out of packages, and which kernel a call takes, is found out again."""
    for module in (libraries, flash_attn, choice):
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Makes the package importable, on a GPU that has its kernels, and returns it."""
    package = ModuleType("flash_attn")
    package.__version__ = "2.8.3"  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec("flash_attn", None)
    interface = ModuleType("flash_attn.flash_attn_interface")
    for function in FLASH_ATTN:
        setattr(interface, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, MODULE, interface)
    monkeypatch.setattr(flash_attn, "capability", lambda _: (9, 0))
    forget()
    return package

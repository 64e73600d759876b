"""Attention by the package ``flash-attn``, where it is installed."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import torch
from torch import Tensor

from ..runtime.libraries import imported, installed
from ..torch_internals import flash_attn_backwards
from .call import Call, Heads, Kernel, Request, Result
from .sdpa import HALF, capability, first, turned

_MODULE = "flash_attn.flash_attn_interface"
_OLDEST = (2, 7)  # in which both sides of a window came to be arguments of their own


def _how(call: Call) -> dict[str, Any]:
    return {
        "causal": call.causal,
        "softcap": call.softcap or 0.0,
        "alibi_slopes": call.slopes,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _window(call: Call) -> tuple[int, int]:
    """How many keys a query sees to its left and to its right; -1 is all."""
    if call.window is None:
        return -1, -1
    return call.window - 1, 0 if call.causal else call.window - 1


def _sequences(call: Call) -> dict[str, Any]:
    ends, longest = call.cu_seqlens, call.max_seqlen
    return {
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _forward(x: Heads, call: Call) -> Result:
    library: Any = importlib.import_module(_MODULE)
    how = {**_how(call), "dropout_p": 0.0, "softmax_scale": call.scale}
    how |= {"window_size": _window(call), "return_attn_probs": True}
    with torch.no_grad():
        if call.cu_seqlens is None:
            y, logsumexp, _ = library.flash_attn_func(*turned(*x), **how)
            return Result(y.transpose(1, 2), logsumexp)
        rows = [t.squeeze(0) for t in turned(*x)]
        y, logsumexp, _ = library.flash_attn_varlen_func(*rows, **_sequences(call), **how)
    return Result(y.unsqueeze(0).transpose(1, 2), logsumexp)


def _backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Any:
    backwards = flash_attn_backwards(importlib.import_module(_MODULE))
    assert backwards is not None
    whole, packed = backwards
    left, right = _window(call)
    how = {**_how(call), "dropout_p": 0.0, "softmax_scale": call.scale}
    how |= {"window_size_left": left, "window_size_right": right}
    dy, q, k, v, y = turned(dy, *x, r.output)
    grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    if call.cu_seqlens is None:
        whole(dy, q, k, v, y, r.logsumexp, *grads, **how)
    else:
        rows = [t.squeeze(0) for t in (dy, q, k, v, y)]
        outs = [t.squeeze(0) for t in grads]
        packed(*rows, r.logsumexp, *outs, **_sequences(call), **how)
    return turned(*grads)


def _prepare(x: Heads, call: Call, differentiable: bool) -> str | None:
    return _unusable()


@functools.cache
def _unusable() -> str | None:
    """Why the package that is installed cannot be used here; found out by the first call."""
    package = imported("flash_attn")
    if isinstance(package, str):
        return package
    version = str(getattr(package, "__version__", "0"))
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < _OLDEST:
        return f"flash_attn {version} is older than {_OLDEST[0]}.{_OLDEST[1]}"
    found = imported(_MODULE)
    if isinstance(found, str):
        return found
    if flash_attn_backwards(found) is None:
        return f"flash_attn {version} has another backward"
    return None


def _refusal(r: Request) -> str | None:
    reason = first(
        (r.device.type != "cuda", f"it runs on a GPU, not on {r.device.type}"),
        (r.empty, "there is no element"),
        (r.dtype not in HALF, f"it computes in fp16 and bf16, not in {r.dtype}"),
        (r.mask, "it takes no mask"),
        (r.dropout > 0, "it is asked for no dropout"),
        (r.head_dim != r.v_head_dim, "it has one size for heads of keys and of values"),
        (r.head_dim > 256, "heads have more than 256 entries"),
        (bool(r.head_dim % 8), "head sizes must be multiples of 8"),
        # With causality it adds slope * j instead of -slope * (i - j), which has the same softmax.
        (r.sinks and r.alibi, "with ALiBi its log-sum-exp is that of other scores"),
        (r.traced, "it is not asked where torch.compile traces"),
    )
    if reason is not None:
        return reason
    major, minor = capability(r.device)
    return first(
        (major < 8, f"it needs compute capability 8.0, have {major}.{minor}"),
        (not installed("flash_attn"), "flash_attn is not installed"),
    )


FLASH_ATTN = Kernel(_refusal, _forward, _backward, prepare=_prepare)

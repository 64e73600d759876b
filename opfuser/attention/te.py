"""Attention by Transformer Engine, which calls cuDNN; only where it is asked for by name."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from ..libraries import imported
from .call import Call, Heads, Kernel, Request, Result
from .sdpa import HALF, capability, first, turned

__all__ = ["TE"]

_MODULE = "transformer_engine.pytorch.cpp_extensions.fused_attn"


def _how(x: Heads, call: Call) -> dict[str, Any]:
    """What both passes are told. Only the names of layouts differ between batch and sequences."""
    packed = call.cu_seqlens is not None
    layout = "thd" if packed else "bshd"
    window = -1 if call.window is None else call.window - 1
    mask = "causal" if call.causal else "no_mask"
    if packed:
        mask = "padding_causal" if call.causal else "padding"
    elif call.causal and x.q.shape[2] != x.k.shape[2]:
        mask = "causal_bottom_right"
    return {
        "attn_scale": call.scale,
        "dropout": 0.0,
        "qkv_layout": "_".join([layout] * 3),
        "o_format": layout,
        "attn_mask_type": mask,
        "window_size": (window, 0 if call.causal else window),
        "bottom_right_diagonal": x.q.shape[2] != x.k.shape[2],
        "cuda_graph": torch.cuda.is_available() and torch.cuda.is_current_stream_capturing(),
    }


def _lengths(x: Heads, call: Call) -> tuple[int, int, Tensor, Tensor]:
    """The longest queries and keys, and where they begin."""
    if call.cu_seqlens is not None:
        return call.max_seqlen, call.max_seqlen, call.cu_seqlens, call.cu_seqlens
    batch, _, queries, _ = x.q.shape
    keys = x.k.shape[2]
    ends = [
        torch.arange(batch + 1, device=x.q.device, dtype=torch.int32) * length
        for length in (queries, keys)
    ]
    return queries, keys, *ends  # type: ignore[return-value]


def _padded(call: Call) -> dict[str, Tensor]:
    if call.cu_seqlens is None:
        return {}
    return {"cu_seqlens_q_padded": call.cu_seqlens, "cu_seqlens_kv_padded": call.cu_seqlens}


def _laid_out(call: Call, *heads: Tensor) -> list[Tensor]:
    """(B, H, S, D) as (B, S, H, D), or as (T, H, D) for sequences; each in memory of its own."""
    rows = [t.contiguous() for t in turned(*heads)]
    return rows if call.cu_seqlens is None else [t.squeeze(0) for t in rows]


def _heads(call: Call, *rows: Tensor) -> list[Tensor]:
    return turned(*(rows if call.cu_seqlens is None else [t.unsqueeze(0) for t in rows]))


def _forward(x: Heads, call: Call) -> Result:
    library: Any = importlib.import_module(_MODULE)
    backend = library.FusedAttnBackend["F16_arbitrary_seqlen"]
    given = *_lengths(x, call), *_laid_out(call, *x), x.q.dtype, backend
    y, kept = library.fused_attn_fwd(True, *given, **_padded(call), **_how(x, call))[:2]
    (output,) = _heads(call, y)
    return Result(output, kept[0], kept[1])


def _backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Any:
    library: Any = importlib.import_module(_MODULE)
    backend = library.FusedAttnBackend["F16_arbitrary_seqlen"]
    how = _how(x, call)
    how |= {"do_format": how["o_format"], "dqkv_layout": how["qkv_layout"]}
    how["deterministic"] = torch.are_deterministic_algorithms_enabled()
    rows = _laid_out(call, *x, r.output, dy)
    given = *_lengths(x, call), *rows, x.q.dtype, [r.logsumexp, r.seed], backend
    grads = library.fused_attn_bwd(*given, **_padded(call), **how)
    return _heads(call, *grads[:3])


def _refusal(r: Request) -> str | None:
    reason = first(
        (r.device.type != "cuda", f"it runs on a GPU, not on {r.device.type}"),
        (r.empty, "there is no element"),
        (r.dtype not in HALF, f"it computes in fp16 and bf16, not in {r.dtype}"),
        (r.mask, "it is given no mask"),
        (r.softcap, "it has no soft-capping"),
        (r.alibi, "it is given no ALiBi bias"),
        (r.dropout > 0, "it is asked for no dropout"),
        (r.sinks, "its log-sum-exp is not read"),
        (r.window and not r.causal, "its window is asked for with causality"),
        (r.causal and r.queries > r.keys, "there are more queries than keys"),
        (r.head_dim != r.v_head_dim, "it is asked for one size for heads of keys and of values"),
        (bool(r.head_dim % 8), "head sizes must be multiples of 8"),
        (r.traced, "it is not asked where torch.compile traces"),
    )
    if reason is not None:
        return reason
    major, minor = capability(r.device)
    reason = first((major < 8, f"it needs compute capability 8.0, have {major}.{minor}"))
    return reason or _unusable()


def _unusable() -> str | None:
    """Why the library cannot be used here."""
    found = imported(_MODULE)
    if isinstance(found, str):
        return found
    arguments = inspect.signature(found.fused_attn_bwd).parameters
    if "bottom_right_diagonal" in arguments and "dqkv_dtype" not in arguments:
        return None
    return "it is called as Transformer Engine 2.20 has it, and this one has other arguments"


TE = Kernel(_refusal, _forward, _backward, by_name=True)

"""Attention in an exported program: torch's own function, whose kernel is chosen when it runs.

So the program runs on other devices than that on which it was exported.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.scalar import cast, wide_dtype
from .blockwise import BLOCKWISE, hidden_keys
from .call import Call, Heads, Kernel, Request, Result
from .choice import expanded
from .reference import plain_attention

__all__ = ["EXPORTED"]


def _is_causal(x: Heads, call: Call) -> bool:
    """Whether causality, counted from the first key, is all that hides keys."""
    if any(t is not None for t in (call.window, call.mask, call.cu_seqlens, call.start)):
        return False
    return bool(call.causal and x.q.shape[2] == x.k.shape[2])  # not a symbol


def _mask(x: Heads, call: Call) -> Tensor | None:
    """All that hides keys or is added to scores."""
    hidden = hidden_keys(x, call, slice(0, x.q.shape[2]), slice(0, x.k.shape[2]))
    mask = call.mask
    if hidden is None:
        return mask if mask is None or mask.dtype == torch.bool else cast(mask, x.q.dtype)
    if mask is None or mask.dtype == torch.bool:
        return ~hidden[None, None] if mask is None else mask & ~hidden
    return cast(mask, x.q.dtype).masked_fill(hidden, -torch.inf)


def _forward(x: Heads, call: Call) -> Result:
    if call.softcap is not None or call.slopes is not None or call.sinks is not None:
        wide = wide_dtype(x.q.dtype)
        heads = Heads(*[cast(t, wide) for t in expanded(x)])
        return Result(cast(plain_attention(heads, call), x.q.dtype))
    causal = _is_causal(x, call)
    y = F.scaled_dot_product_attention(
        *x,
        attn_mask=None if causal else _mask(x, call),
        dropout_p=call.dropout_p,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=x.q.shape[1] != x.k.shape[1],
    )
    # Kernels differ in their layouts, but what reads the output is recorded for one of them.
    return Result(y.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2))


def _refusal(request: Request) -> str | None:
    return None


# Its backward is torch's, of the program.
EXPORTED = Kernel(_refusal, _forward, BLOCKWISE.backward, has_sinks=True)

"""Attention in an exported program: torch's own function, whose kernel is chosen when it runs.

So the program runs on other devices than that on which it was exported.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import torch_internals as internals
from ..kernels.scalar import cast, wide_dtype
from ..runtime.recording import refuse_watching
from .blockwise import BLOCKWISE, hidden_keys
from .call import Call, Heads, Kernel, Request, Result, hiding, mask_of
from .choice import expanded, like
from .reference import plain_attention

_SOME = 64  # queries and keys; which kernels take them does not depend on the number


def _is_causal(x: Heads, call: Call) -> bool:
    """Whether causality, counted from the first key, is all that hides keys."""
    others = call.window, call.mask, call.bias, call.cu_seqlens, call.start
    if any(t is not None for t in others):
        return False
    return bool(call.causal and x.q.shape[2] == x.k.shape[2])  # not a symbol


def _mask(x: Heads, call: Call) -> Tensor | None:
    """All that hides keys or is added to scores."""
    hidden = hidden_keys(x, call, slice(0, x.q.shape[2]), slice(0, x.k.shape[2]))
    mask = mask_of(call)
    if mask is not None and mask.dtype != torch.bool:
        mask = cast(mask, x.q.dtype)
    return mask if hidden is None else hiding(mask, hidden)


def _kind(x: Heads, call: Call, causal: bool, mask: Tensor | None) -> Request:
    """What the kernel is chosen by, for any lengths."""
    q, k, v = x
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in x)
    return Request(
        q.device, q.dtype, _SOME, _SOME, q.shape[1], k.shape[1], q.shape[3], v.shape[3],
        causal, differentiable, mask=mask is not None, dropout=call.dropout_p > 0,
    )  # fmt: skip


@internals.constant_result
def _takes_groups(*fields: Any) -> bool:
    """Whether torch has a kernel on this device that takes fewer key heads than query heads."""
    request = Request(*fields)
    # torch looks at real tensors, which a tracer does not have.
    with internals.without_modes():
        x, call = like(request)
        q = x.q.requires_grad_(request.differentiable)
        how: Any = {"scale": call.scale, "enable_gqa": True}
        given = q, x.k, x.v, call.mask, call.dropout_p, call.causal
        return internals.sdp_choice(*given, **how) != SDPBackend.MATH.value


def _forward(x: Heads, call: Call) -> Result:
    refuse_watching("attention for exported programs limits the kernels of torch")
    if call.softcap is not None or call.slopes is not None or call.sinks is not None:
        wide = wide_dtype(x.q.dtype)
        heads = Heads(*[cast(t, wide) for t in expanded(x)])
        return Result(cast(plain_attention(heads, call), x.q.dtype))
    causal = _is_causal(x, call)
    mask = None if causal else _mask(x, call)
    if x.q.shape[1] != x.k.shape[1] and not _takes_groups(*_kind(x, call, causal, mask)):
        x = expanded(x)  # as the formula would, and so that other kernels take them
    grouped = x.q.shape[1] != x.k.shape[1]
    # Other kernels' rules for lengths, such as whether rows of a mask are aligned, would be rules
    # of the program. The formula has none, and it is only looked at: what is recorded is the call.
    with nullcontext() if grouped else sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(
            *x,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=causal,
            scale=call.scale,
            enable_gqa=grouped,
        )
    # Kernels differ in their layouts, but what reads the output is recorded for one of them.
    return Result(y.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2))


def _refusal(request: Request) -> str | None:
    return None


# Its backward is torch's, of the program.
EXPORTED = Kernel(_refusal, _forward, BLOCKWISE.backward, has_sinks=True)

"""The kernels behind torch's ``scaled_dot_product_attention``, forward and backward apart."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .blockwise import hidden_keys
from .call import Call, Grads, Heads, Kernel, Request, Result, additive, hiding, mask_of

_aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
_ALIGNMENT = 16  # elements of a row of biases, as torch pads them
# What cuDNN adds to the score of a key that a mask hides, as the function of torch 2.11 does. A row
# of -inf may become NaN, and far lower numbers lose their differences to the log-sum-exp.
_FAR = -65504.0
_FROM_LAST_KEY = 2  # how the efficient kernel counts causality; 1 is from the first key
_FROM_FIRST_KEY = 1


def _cpu_forward(x: Heads, call: Call) -> Result:
    forward = _aten._scaled_dot_product_flash_attention_for_cpu
    mask = mask_of(call)
    if mask is None:
        return Result(*forward(*x, 0.0, call.causal, scale=call.scale))
    bias = additive(mask, x.q.dtype)
    return Result(*forward(*x, 0.0, call.causal, attn_mask=bias, scale=call.scale))


def _cpu_backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Any:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    mask = mask_of(call)
    bias = None if mask is None else additive(mask, x.q.dtype)
    given = dy, *x, r.output, r.logsumexp, 0.0, call.causal
    return backward(*given, attn_mask=bias, scale=call.scale)


def turned(*heads: Tensor) -> list[Tensor]:
    """(B, H, S, D) as (B, S, H, D), or back."""
    return [t.transpose(1, 2) for t in heads]


def _window(call: Call) -> dict[str, int]:
    if call.window is None:
        return {}
    ahead = 0 if call.causal else call.window - 1
    return {"window_size_left": call.window - 1, "window_size_right": ahead}


def _flash_forward(x: Heads, call: Call) -> Result:
    p, causal, scale = call.dropout_p, call.causal, call.scale
    if call.cu_seqlens is not None:
        rows = [t.squeeze(0) for t in turned(*x)]
        out = _aten._flash_attention_forward(
            *rows, *_ends(call), p, causal, False, scale=scale, **_window(call)
        )
        return Result(out[0].unsqueeze(0).transpose(1, 2), *out[1:4])
    if call.window is not None:
        lengths = None, None, x.q.shape[2], x.k.shape[2]
        out = _aten._flash_attention_forward(
            *turned(*x), *lengths, p, causal, False, scale=scale, **_window(call)
        )
        return Result(out[0].transpose(1, 2), *out[1:4])
    out = _aten._scaled_dot_product_flash_attention(*x, p, causal, scale=scale)
    return Result(out[0], out[1], out[6], out[7])


def _flash_backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Any:
    p, causal, scale = call.dropout_p, call.causal, call.scale
    lengths = None, None, x.q.shape[2], x.k.shape[2]
    if call.cu_seqlens is not None:
        dy, *rows, y = [t.squeeze(0) for t in turned(dy, *x, r.output)]
        grads = _aten._flash_attention_backward(
            dy, *rows, y, r.logsumexp, *_ends(call), p, causal, r.seed, r.offset,
            scale=scale, **_window(call),
        )  # fmt: skip
        return turned(*[grad.unsqueeze(0) for grad in grads])
    if call.window is not None:
        dy, *rows, y = turned(dy, *x, r.output)
        grads = _aten._flash_attention_backward(
            dy, *rows, y, r.logsumexp, *lengths, p, causal, r.seed, r.offset,
            scale=scale, **_window(call),
        )  # fmt: skip
        return turned(*grads)
    backward = _aten._scaled_dot_product_flash_attention_backward
    given = r.output, r.logsumexp, *lengths, p, causal, r.seed, r.offset
    return backward(dy, *x, *given, scale=scale)


def _bias(x: Heads, call: Call) -> Tensor | None:
    """The mask as the efficient kernel takes it: of full shape, with rows that begin aligned."""
    mask = mask_of(call)
    if mask is None:
        return None
    bias = additive(mask, x.q.dtype)
    keys = x.k.shape[2]
    bias = bias.expand(*bias.shape[:3], keys)
    bias = F.pad(bias, (0, -keys % _ALIGNMENT)).contiguous()[..., :keys]
    return bias.expand(*x.q.shape[:3], keys)


def _causality(x: Heads, call: Call) -> int:
    if not call.causal:
        return 0
    return _FROM_FIRST_KEY if x.q.shape[2] == x.k.shape[2] else _FROM_LAST_KEY


def _by_efficient_sdpa(x: Heads, call: Call) -> bool:
    """Whether the entry of scaled_dot_product_attention can express the call."""
    aligned = not call.causal or x.q.shape[2] == x.k.shape[2]
    return aligned and call.window is None and call.cu_seqlens is None


def _ends(call: Call) -> tuple[Any, Any, Any, Any]:
    """Where sequences begin and end, and the longest of them, of queries and keys."""
    longest = None if call.cu_seqlens is None else call.max_seqlen
    return call.cu_seqlens, call.cu_seqlens, longest, longest


def _only_masked(x: Heads, call: Call) -> Call:
    """The call with all that hides keys in its mask, if the gradient of a bias is asked for.

    The kernel does not write that gradient for blocks of keys which causality or a window skips.
    """
    if not call.bias_grad:
        return call
    hidden = hidden_keys(x, call, slice(0, x.q.shape[2]), slice(0, x.k.shape[2]))
    if hidden is None:
        return call
    return call._replace(causal=False, window=None, mask=hiding(call.mask, hidden))


def _efficient_forward(x: Heads, call: Call) -> Result:
    call = _only_masked(x, call)
    bias, p, scale = _bias(x, call), call.dropout_p, call.scale
    if _by_efficient_sdpa(x, call):
        forward = _aten._scaled_dot_product_efficient_attention
        return Result(*forward(*x, bias, True, p, call.causal, scale=scale))
    out = _aten._efficient_attention_forward(
        *turned(*x), bias, *_ends(call), p, _causality(x, call), True,
        scale=scale, window_size=call.window,
    )  # fmt: skip
    return Result(out[0].transpose(1, 2), *out[1:4])


def _efficient_backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Any:
    call = _only_masked(x, call)
    bias, p, scale = _bias(x, call), call.dropout_p, call.scale
    if _by_efficient_sdpa(x, call):
        wanted = [True, True, True, call.bias_grad]
        backward = _aten._scaled_dot_product_efficient_attention_backward
        dq, dk, dv, dbias = backward(dy, *x, bias, *r, p, wanted, call.causal, scale=scale)
        return Grads(dq, dk, dv, bias=dbias)
    *starts, queries, keys = _ends(call)
    lengths = (x.q.shape[2], x.k.shape[2]) if queries is None else (queries, keys)
    dy, *rows, y = turned(dy, *x, r.output)
    grads = _aten._efficient_attention_backward(
        dy, *rows, bias, y, *starts, *lengths, r.logsumexp, p, r.seed, r.offset,
        _causality(x, call), False, scale=scale, window_size=call.window,
    )  # fmt: skip
    return turned(*grads[:3])


def _cudnn_bias(x: Heads, call: Call) -> Tensor | None:
    """The bool mask as cuDNN takes it: finite numbers, those of a row side by side."""
    if call.mask is None:
        return None
    mask = call.mask.expand(-1, -1, -1, x.k.shape[2]).contiguous()
    return additive(mask, x.q.dtype, _FAR).expand(x.q.shape[0], -1, x.q.shape[2], -1)


def _without_blind(t: Tensor, x: Heads, call: Call) -> Tensor:
    """(B, H, S, V) with 0 for the queries that see no key.

    Their weights in cuDNN are finite, and not 0: without the gradient of their output, they have
    none, nor a share in those of keys and values.
    """
    if call.mask is None:
        return t
    seen = call.mask
    if call.causal:
        seen = seen.expand(-1, -1, x.q.shape[2], x.k.shape[2]).tril()
    return t.masked_fill(~seen.any(-1, keepdim=True), 0.0)


def _cudnn_forward(x: Heads, call: Call) -> Result:
    forward = _aten._scaled_dot_product_cudnn_attention
    bias = _cudnn_bias(x, call)
    out = forward(*x, bias, True, call.dropout_p, call.causal, False, scale=call.scale)
    return Result(_without_blind(out[0], x, call), out[1], out[6], out[7])


def _cudnn_backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Any:
    bias_and_lengths = (_cudnn_bias(x, call), None, None, x.q.shape[2], x.k.shape[2])
    backward = _aten._scaled_dot_product_cudnn_attention_backward
    dy = _without_blind(dy, x, call)
    given = dy, *x, *r, *bias_and_lengths, call.dropout_p, call.causal
    return backward(*given, scale=call.scale)


def first(*reasons: tuple[bool, str]) -> str | None:
    """The first reason that holds."""
    return next((why for holds, why in reasons if holds), None)


def _cpu_refusal(r: Request) -> str | None:
    return first(
        (r.device.type != "cpu", f"it runs on a CPU, not on {r.device.type}"),
        (r.empty, "it divides by the number of elements, which is zero"),
        (r.softcap, "it has no soft-capping"),
        (r.alibi, "it has no ALiBi bias"),
        (r.window, "it has no window"),
        (r.varlen, "it has no cu_seqlens"),
        (r.bias_grad, "it computes no gradient of a bias"),
        (r.dropout > 0, "it has no dropout"),
        (not r.aligned, "it counts causality from the first key"),
        (r.head_dim != r.v_head_dim, "it has one size for heads of keys and of values"),
    )


@functools.lru_cache(None)
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (9, 0) where there is none, as while a graph is traced."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)


def has_little_shared_memory(major: int, minor: int) -> bool:
    """Whether a block of a GPU of that capability has less than 100 KiB, where others have 163."""
    return (major, minor) in ((8, 6), (8, 9)) or major == 12


def _gpu_refusal(r: Request) -> str | None:
    return first(
        (r.device.type != "cuda", f"it runs on a GPU, not on {r.device.type}"),
        (r.empty, "there is no element"),
        (bool(r.head_dim % 8 or r.v_head_dim % 8), "head sizes must be multiples of 8"),
        (r.softcap, "it has no soft-capping"),
        (r.alibi, "it has no ALiBi bias"),
    )


def _flash_refusal(r: Request) -> str | None:
    reason = _gpu_refusal(r) or first(
        (not r.enabled[0], "torch.backends.cuda.enable_flash_sdp(False) is set"),
        (r.dtype not in HALF, f"it computes in fp16 and bf16, not in {r.dtype}"),
        (r.mask, "it takes no mask"),
        (r.head_dim != r.v_head_dim, "it has one size for heads of keys and of values"),
        (r.head_dim > 256, "heads have more than 256 entries"),
    )
    if reason is not None:
        return reason
    major, minor = capability(r.device)
    small = has_little_shared_memory(major, minor)
    largest = 192 if r.dropout else 224
    return first(
        (major < 8, f"it needs compute capability 8.0, have {major}.{minor}"),
        (
            small and r.differentiable and r.head_dim > largest,
            f"its backward has no heads of more than {largest} entries on this GPU",
        ),
    )


def _efficient_refusal(r: Request) -> str | None:
    return _gpu_refusal(r) or first(
        (not r.enabled[1], "torch.backends.cuda.enable_mem_efficient_sdp(False) is set"),
        (r.dtype == torch.float64, "it does not compute in fp64"),
        (r.varlen and r.mask, "it takes no mask beside cu_seqlens"),
        (r.varlen and r.sinks, "with cu_seqlens its log-sum-exp is padded"),
        (r.window and not r.causal, "its window is causal"),
        # Seen on an H200 with torch 2.11.
        (r.window and not r.aligned, "its window is another one where queries are fewer than keys"),
        (r.causal and r.queries > r.keys, "there are more queries than keys"),
        (
            # In torch 2.13, the meta function of that operator has not the arguments of its schema.
            r.traced and r.differentiable and (r.window or r.varlen or not r.aligned),
            "torch cannot trace its backward with a window, cu_seqlens or fewer queries than keys",
        ),
    )


def _cudnn_refusal(r: Request) -> str | None:
    return _gpu_refusal(r) or first(
        (not r.enabled[2], "torch.backends.cuda.enable_cudnn_sdp(False) is set"),
        (r.dtype not in HALF, f"it computes in fp16 and bf16, not in {r.dtype}"),
        (r.additive, "it takes bool masks: rows that large numbers hide may be NaN there"),
        (r.window, "torch offers it without a window"),
        (r.varlen, "torch offers it without cu_seqlens"),
        (not r.aligned, "torch counts its causality from the first key"),
    )


CPU = Kernel(_cpu_refusal, _cpu_forward, _cpu_backward)
CUDNN = Kernel(_cudnn_refusal, _cudnn_forward, _cudnn_backward)
FLASH = Kernel(_flash_refusal, _flash_forward, _flash_backward)
EFFICIENT = Kernel(_efficient_refusal, _efficient_forward, _efficient_backward, grouped=False)

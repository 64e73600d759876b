"""Attention over packed queries, keys and values, by torch's own kernels.

Dimensions: B batch, S sequence, H query heads, K key and value heads, G = H / K, D entries per
head. Kernels see queries (B, H, S, D), keys and values (B, K, S, D), as views of the packed tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, InputError, explain
from ..op import BasicOperation, OperationContext, compute_dtype

__all__ = ["DotProductAttention"]

_aten = torch.ops.aten

# Scores that the fallback holds at a time: 128 MiB in fp32.
_FALLBACK_SCORES = 1 << 25


class _Result(NamedTuple):
    """What a kernel's forward hands to its backward, besides its inputs."""

    output: Tensor
    logsumexp: Tensor | None = None
    seed: Tensor | None = None
    offset: Tensor | None = None


class _Kernel(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], _Result]
    backward: Callable[..., tuple[Tensor, ...]]
    grouped: bool
    """Whether it takes fewer key heads than query heads."""


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Result:
    return _Result(
        *_aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    )


def _cpu_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, r: _Result, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        dy, q, k, v, r.output, r.logsumexp, 0.0, causal, scale=scale
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Result:
    out = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return _Result(out[0], out[1], out[6], out[7])


def _flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, r: _Result, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    length = q.shape[2]
    return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        dy, q, k, v, r.output, r.logsumexp, None, None, length, length, 0.0, causal,
        r.seed, r.offset, scale=scale,
    )  # fmt: skip


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Result:
    return _Result(
        *_aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
    )


def _efficient_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, r: _Result, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        dy, q, k, v, None, r.output, r.logsumexp, r.seed, r.offset, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return grads[:3]  # type: ignore[no-any-return]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Result:
    out = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return _Result(out[0], out[1], out[6], out[7])


def _cudnn_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, r: _Result, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    length = q.shape[2]
    return _aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        dy, q, k, v, r.output, r.logsumexp, r.seed, r.offset, None, None, None,
        length, length, 0.0, causal, scale=scale,
    )  # fmt: skip


def _weights(
    q: Tensor, k: Tensor, causal: bool, scale: float, rows: slice
) -> tuple[Tensor, Tensor, slice]:
    """Attention of a block of queries, in fp32 or better.

    Returns:
        The queries (B, K, G·rows, D), their weights (B, K, G·rows, keys), and which keys.
    """
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    block = q.unflatten(1, (kv_heads, heads // kv_heads))[:, :, :, rows]
    keys = slice(0, rows.stop if causal else length)
    scores = block.reshape(batch, kv_heads, -1, dim) @ k[:, :, keys].transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if causal:
        hidden = torch.ones(block.shape[3], keys.stop, dtype=torch.bool, device=q.device)
        shape = (batch, kv_heads, heads // kv_heads, *hidden.shape)
        hidden = hidden.triu_(rows.start + 1)
        scores = scores.view(shape).masked_fill_(hidden, -math.inf).flatten(2, 3)
    return block.reshape(batch, kv_heads, -1, dim), scores.softmax(-1), keys


def _blocks(q: Tensor) -> list[slice]:
    batch, heads, length, _ = q.shape
    size = max(1, _FALLBACK_SCORES // (batch * heads * length))
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def _fallback_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Result:
    batch, heads, length, dim = q.shape
    output = q.new_empty(batch, length, heads, dim).transpose(1, 2)
    for rows in _blocks(q):
        _, p, keys = _weights(q, k, causal, scale, rows)
        block = output[:, :, rows]
        block.copy_((p.to(v.dtype) @ v[:, :, keys]).view(block.shape))
    return _Result(output)


def _fallback_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, r: _Result, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    dq = torch.empty_like(q)
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros_like(t, dtype=acc_dtype) for t in (k, v))
    for rows in _blocks(q):
        q_rows, p, keys = _weights(q, k, causal, scale, rows)
        dy_rows = dy[:, :, rows].reshape(q_rows.shape)
        dv[:, :, keys] += p.to(v.dtype).transpose(2, 3) @ dy_rows
        ds = (dy_rows @ v[:, :, keys].transpose(2, 3)).to(acc_dtype)
        ds = p.mul_(ds.sub_((p * ds).sum(-1, keepdim=True))).mul_(scale).to(q.dtype)
        block = dq[:, :, rows]
        block.copy_((ds @ k[:, :, keys]).view(block.shape))
        dk[:, :, keys] += ds.transpose(2, 3) @ q_rows
    return dq, dk, dv


_KERNELS = {
    "cpu": _Kernel(_cpu_forward, _cpu_backward, grouped=True),
    "flash": _Kernel(_flash_forward, _flash_backward, grouped=True),
    "efficient": _Kernel(_efficient_forward, _efficient_backward, grouped=False),
    "cudnn": _Kernel(_cudnn_forward, _cudnn_backward, grouped=True),
    "fallback": _Kernel(_fallback_forward, _fallback_backward, grouped=True),
}
_BY_CHOICE = {1: "flash", 2: "efficient", 3: "cudnn"}  # torch.nn.attention.SDPBackend


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_flash(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


def _choose(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, differentiable: bool) -> str:
    """Names the kernel for these inputs. On a GPU it is the one that torch would take."""
    if q.device.type == "cpu":
        return "cpu"
    # torch's flash and cuDNN kernels expect other head sizes to be padded.
    if q.device.type != "cuda" or q.shape[-1] % 8:
        return "fallback"
    grouped = q.shape[1] != k.shape[1]
    if torch.compiler.is_compiling() or type(q) is not Tensor:
        # torch's own choice looks at real tensors, which a tracer does not have.
        if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256:
            return "flash" if _has_flash(q.device.index) else "efficient"
        return "efficient" if q.dtype == torch.float32 else "fallback"
    with torch.set_grad_enabled(differentiable):  # some kernels have no backward on some GPUs
        q = q.detach().requires_grad_(differentiable)
        choice = torch._fused_sdp_choice(
            q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped
        )
        if grouped and choice not in _BY_CHOICE:
            k, v = _expand(k, q), _expand(v, q)
            choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale)
    return _BY_CHOICE.get(choice, "fallback")


def _expand(heads: Tensor, q: Tensor) -> Tensor:
    """Repeats each of the K heads for its G queries: a copy."""
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1)


class DotProductAttention(BasicOperation):
    r"""Multi-head attention: per head, :math:`y = \mathrm{softmax}(s\, q k^T) v`.

    Runs torch's own kernels for scaled dot product attention, forward and backward; on a GPU the
    one that torch chooses. No attention matrix is stored. Where no kernel takes the input (on a
    GPU: fp64, or a head size that is no multiple of 8), attention is computed for a block of
    queries at a time, and again in backward. There is no dropout of attention weights.

    Shapes: input ``(batch, sequence, (num_heads + 2 * num_kv_heads) * head_dim)``: the heads of the
    queries, then of the keys, then of the values; the head size follows from the shape. Output
    ``(batch, sequence, num_heads * head_dim)``, in the autocast dtype if autocast is active, else
    the input's. Query head h attends to key head ``h // (num_heads / num_kv_heads)``.

    Saved: the packed input, the output and the log-sum-exp of the scores, fp32, one value per query
    and head.

    Sources: Vaswani et al., "Attention Is All You Need", 2017; Dao et al., "FlashAttention", 2022;
    Ainslie et al., "GQA", 2023.

    Args:
        num_heads: query heads.
        num_kv_heads: key heads, and as many value heads; None is ``num_heads``.
        causal: whether a position attends only to itself and to earlier ones.
        scale: s; None is ``head_dim ** -0.5``.

    Raises:
        ArgumentError: if a number of heads is not positive, or not divisible as needed.
        InputError: in forward, if the input's shape or dtype is not as above.
    """

    class Saved(NamedTuple):
        qkv: Tensor
        output: Tensor | None
        logsumexp: Tensor | None
        seed: Tensor | None
        offset: Tensor | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        causal: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ArgumentError(
                explain(
                    "num_heads must be a positive multiple of num_kv_heads",
                    where="DotProductAttention",
                    received=f"num_heads={num_heads}, num_kv_heads={num_kv_heads}",
                )
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.causal = causal
        self.scale = scale

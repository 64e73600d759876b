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
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ArgumentError, InputError, explain
from ..kernels.launch import transforms_active
from ..kernels.scalar import cast
from ..op import BasicOperation, Dtypes, OperationContext, in_compute_dtype

__all__ = ["DotProductAttention"]

_aten = torch.ops.aten
_FALLBACK_SCORES = 1 << 25  # held at a time: 128 MiB in fp32


class _Heads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


class _Result(NamedTuple):
    """What a kernel's forward hands to its backward, besides its inputs."""

    output: Tensor
    logsumexp: Tensor | None = None
    seed: Tensor | None = None
    offset: Tensor | None = None


class _Kernel(NamedTuple):
    forward: Callable[[_Heads, bool, float], _Result]
    backward: Callable[[Tensor, _Heads, _Result, bool, float], Any]
    grouped: bool  # whether it takes fewer key heads than query heads


def _cpu_forward(x: _Heads, causal: bool, scale: float) -> _Result:
    forward = _aten._scaled_dot_product_flash_attention_for_cpu
    return _Result(*forward(*x, 0.0, causal, scale=scale))


def _cpu_backward(dy: Tensor, x: _Heads, r: _Result, causal: bool, scale: float) -> Any:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(dy, *x, r.output, r.logsumexp, 0.0, causal, scale=scale)


def _flash_forward(x: _Heads, causal: bool, scale: float) -> _Result:
    out = _aten._scaled_dot_product_flash_attention(*x, 0.0, causal, scale=scale)
    return _Result(out[0], out[1], out[6], out[7])


def _flash_backward(dy: Tensor, x: _Heads, r: _Result, causal: bool, scale: float) -> Any:
    lengths = (None, None, x.q.shape[2], x.q.shape[2])
    dropout = (0.0, causal, r.seed, r.offset)
    backward = _aten._scaled_dot_product_flash_attention_backward
    return backward(dy, *x, r.output, r.logsumexp, *lengths, *dropout, scale=scale)


def _efficient_forward(x: _Heads, causal: bool, scale: float) -> _Result:
    forward = _aten._scaled_dot_product_efficient_attention
    return _Result(*forward(*x, None, True, 0.0, causal, scale=scale))


def _efficient_backward(dy: Tensor, x: _Heads, r: _Result, causal: bool, scale: float) -> Any:
    wanted = [True, True, True, False]  # there is no bias
    backward = _aten._scaled_dot_product_efficient_attention_backward
    return backward(dy, *x, None, *r, 0.0, wanted, causal, scale=scale)


def _cudnn_forward(x: _Heads, causal: bool, scale: float) -> _Result:
    forward = _aten._scaled_dot_product_cudnn_attention
    out = forward(*x, None, True, 0.0, causal, False, scale=scale)
    return _Result(out[0], out[1], out[6], out[7])


def _cudnn_backward(dy: Tensor, x: _Heads, r: _Result, causal: bool, scale: float) -> Any:
    bias_and_lengths = (None, None, None, x.q.shape[2], x.q.shape[2])
    backward = _aten._scaled_dot_product_cudnn_attention_backward
    return backward(dy, *x, *r, *bias_and_lengths, 0.0, causal, scale=scale)


def _weights(x: _Heads, causal: bool, scale: float, rows: slice) -> tuple[Tensor, slice]:
    """Attention weights of a block of queries, in fp32 or better, and the keys they are of."""
    keys = slice(0, rows.stop if causal else x.k.shape[2])
    scores = x.q[:, :, rows] @ x.k[:, :, keys].transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(hidden.triu_(rows.start + 1), -math.inf)
    return scores.softmax(-1), keys


def _blocks(q: Tensor) -> list[slice]:
    length = q.shape[2]
    size = max(1, _FALLBACK_SCORES // max(1, q.shape[:3].numel()))
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def _fallback_forward(x: _Heads, causal: bool, scale: float) -> _Result:
    output = torch.empty_like(x.q)
    for rows in _blocks(x.q):
        p, keys = _weights(x, causal, scale, rows)
        output[:, :, rows] = p.to(x.v.dtype) @ x.v[:, :, keys]
    return _Result(output)


def _fallback_backward(dy: Tensor, x: _Heads, r: _Result, causal: bool, scale: float) -> Any:
    dtype = torch.promote_types(dy.dtype, torch.float32)
    dq = torch.empty_like(x.q)
    dk, dv = (torch.zeros_like(t, dtype=dtype) for t in x[1:])
    for rows in _blocks(x.q):
        p, keys = _weights(x, causal, scale, rows)
        dv[:, :, keys] += p.to(dy.dtype).transpose(2, 3) @ dy[:, :, rows]
        dp = (dy[:, :, rows] @ x.v[:, :, keys].transpose(2, 3)).to(dtype)
        ds = (p * (dp - (p * dp).sum(-1, keepdim=True)) * scale).to(dy.dtype)
        dq[:, :, rows] = ds @ x.k[:, :, keys]
        dk[:, :, keys] += ds.transpose(2, 3) @ x.q[:, :, rows]
    return dq, dk.to(dy.dtype), dv.to(dy.dtype)


_KERNELS = {
    "cpu": _Kernel(_cpu_forward, _cpu_backward, grouped=True),
    "flash": _Kernel(_flash_forward, _flash_backward, grouped=True),
    "efficient": _Kernel(_efficient_forward, _efficient_backward, grouped=False),
    "cudnn": _Kernel(_cudnn_forward, _cudnn_backward, grouped=True),
    "fallback": _Kernel(_fallback_forward, _fallback_backward, grouped=False),
}
_SOME_LENGTH = 64  # of a sequence; which kernels take it does not depend on that
_BY_CHOICE = {1: "flash", 2: "efficient", 3: "cudnn"}  # torch.nn.attention.SDPBackend


def _choose(x: _Heads, causal: bool, scale: float, differentiable: bool) -> str:
    """Names the kernel for these inputs. On a GPU it is the one that torch would take."""
    q, k, _ = x
    if q.is_cpu and q.numel():  # without elements it divides by zero
        return "cpu"
    # torch's flash and cuDNN kernels expect other head sizes to be padded.
    if q.device.type != "cuda" or q.shape[-1] % 8 or not q.numel():
        return "fallback"
    if torch.compiler.is_compiling() or type(q) is not Tensor:
        sizes = q.shape[1], k.shape[1], q.shape[3]
        return _choose_for_tracer(q.device, q.dtype, *sizes, causal, scale, differentiable)
    if transforms_active():  # of whose tensors torch cannot tell which kernel takes them
        return "fallback"
    return _choice_of_torch(x, causal, scale, differentiable)


def _choice_of_torch(x: _Heads, causal: bool, scale: float, differentiable: bool) -> str:
    """The kernel that torch would take for real tensors."""
    q, k, v = x
    grouped = q.shape[1] != k.shape[1]
    with torch.set_grad_enabled(differentiable):  # some kernels have no backward on some GPUs
        q = q.detach().requires_grad_(differentiable)
        how: Any = {"is_causal": causal, "scale": scale}
        choice = torch._fused_sdp_choice(q, k, v, **how, enable_gqa=grouped)
        if grouped and choice not in _BY_CHOICE:
            choice = torch._fused_sdp_choice(q, *_expand(x)[1:], **how)
    return _BY_CHOICE.get(choice, "fallback")


def _choose_for_tracer(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
    scale: float,
    differentiable: bool,
) -> str:
    """The choice for tensors like these. torch looks at real ones, which a tracer does not have."""
    with _disable_current_modes():
        sizes = [heads, kv_heads, kv_heads]
        qkv = torch.empty(1, _SOME_LENGTH, sum(sizes), head_dim, dtype=dtype, device=device)
        x = _Heads(*qkv.transpose(1, 2).split(sizes, dim=1))
        return _choice_of_torch(x, causal, scale, differentiable)


# What torch.compiler.assume_constant_result sets; calling it would import the compiler.
_choose_for_tracer._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _expand(x: _Heads) -> _Heads:
    """Repeats each of the K key and value heads for its G queries: copies."""
    group = x.q.shape[1] // x.k.shape[1]
    return _Heads(x.q, *(heads.repeat_interleave(group, dim=1) for heads in x[1:]))


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

    Saved: the packed input, the output and, per query and head, the log-sum-exp of the scores.
    Sources: Vaswani et al., "Attention Is All You Need", 2017; Dao et al., "FlashAttention", 2022.

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

    class Settings(NamedTuple):
        num_heads: int
        num_kv_heads: int
        causal: bool
        scale: float | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        causal: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.causal = causal
        self.scale = scale
        self.make_settings()

    def make_settings(self) -> DotProductAttention.Settings:
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ArgumentError(
                explain(
                    "num_heads must be a positive multiple of num_kv_heads",
                    where="DotProductAttention",
                    received=f"num_heads={num_heads}, num_kv_heads={num_kv_heads}",
                )
            )
        return self.Settings(num_heads, num_kv_heads, self.causal, self.scale)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.compute

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        settings = ctx.settings or self.frozen_settings(ctx)
        _check_input(input_, settings)
        qkv = _aligned(in_compute_dtype(input_).contiguous())
        x = _split(qkv, settings)
        scale = _scale_of(x, settings)
        kernel = _choose(x, settings.causal, scale, ctx.requires_grad)
        chosen = _KERNELS[kernel]
        if not chosen.grouped:
            x = _expand(x)
        result = chosen.forward(x, settings.causal, scale)
        if ctx.requires_grad:
            ctx.kernel = kernel
            output = None if kernel == "fallback" else result.output
            ctx.save_for_backward(qkv, output, *result[1:])
        return result.output.transpose(1, 2).flatten(2)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[()]]:
        if not ctx.needs.input:
            return None, ()
        settings = ctx.settings or self.frozen_settings(ctx)
        qkv, *result = ctx.saved_tensors
        x = _split(qkv, settings)
        dy = _aligned(cast(grad_output, qkv.dtype).contiguous())
        dy = dy.view(*dy.shape[:2], settings.num_heads, x.q.shape[-1]).transpose(1, 2)
        kernel = _KERNELS[ctx.kernel]
        if not kernel.grouped:
            x = _expand(x)
        scale = _scale_of(x, settings)
        grads = kernel.backward(dy, x, _Result(*result), settings.causal, scale)
        dq, dk, dv = [grad.transpose(1, 2) for grad in grads[:3]]
        if not kernel.grouped:
            groups = settings.num_kv_heads, -1
            dk, dv = [grad.unflatten(2, groups).sum(3) for grad in (dk, dv)]
        return torch.cat([dq, dk, dv], 2).view_as(qkv), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        settings = self.make_settings()
        _check_input(input_, settings)
        x = _split(input_, settings)
        q, k, v = _expand(x)
        scores = q @ k.transpose(2, 3) * _scale_of(x, settings)
        if self.causal:
            hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.num_kv_heads}, causal={self.causal}, scale={self.scale}"


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a copy of one that begins at an odd address: torch's kernels read 16 bytes."""
    if x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling():
        return x.clone() if not transforms_active() and x.data_ptr() % 16 else x
    return x


def _split(qkv: Tensor, settings: DotProductAttention.Settings) -> _Heads:
    sizes = [settings.num_heads, settings.num_kv_heads, settings.num_kv_heads]
    batch, length, width = qkv.shape
    heads = qkv.view(batch, length, sum(sizes), width // sum(sizes)).transpose(1, 2)
    # Not by Tensor.split, which takes as long in Python as here.
    return _Heads(*heads.split_with_sizes(sizes, 1))


def _scale_of(x: _Heads, settings: DotProductAttention.Settings) -> float:
    return x.q.shape[-1] ** -0.5 if settings.scale is None else settings.scale


def _check_input(input_: Tensor, settings: DotProductAttention.Settings) -> None:
    heads = settings.num_heads + 2 * settings.num_kv_heads
    shape = input_.shape
    if len(shape) != 3 or not shape[2] or shape[2] % heads or not input_.is_floating_point():
        raise InputError(
            explain(
                f"The input must be floating point, (batch, sequence, {heads} * head_dim)",
                where="DotProductAttention",
                received=f"{tuple(shape)} of {input_.dtype}",
            )
        )

"""What attention is computed of, what comes out, and what the choice of a kernel depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import torch_internals as internals
from ..runtime.tracing import fixed, stands_in


class Heads(NamedTuple):
    """Queries (B, H, S, D), keys (B, K, T, D) and values (B, K, T, V)."""

    q: Tensor
    k: Tensor
    v: Tensor


class Call(NamedTuple):
    """What attention computes besides products.

    A score is ``scale * q k``, soft-capped, plus the ALiBi bias, plus the bias of the call, plus an
    additive mask; a key that causality, window, mask or sequence hide has weight 0. Query i stands
    at position ``i + T - S``, or ``i + start``.

    Attributes:
        causal, scale, window, softcap, dropout_p: as the operation defines them.
        mask: bool (True: attend) or additive, of four dimensions that broadcast to (B, H, S, T).
        slopes: (H,), of ALiBi, in fp32, or in fp64 for heads in fp64.
        cu_seqlens: (N + 1,), int32: where sequences begin that one row holds, and the end.
        max_seqlen: length of the longest one.
        start: 0-d integer tensor, the position of the first query. What it hides is in the mask.
        sinks: (H,), logits that take part in the softmax without a value.
        bias: floating point, of four dimensions that broadcast to (B, H, S, T).
        bias_grad: whether backward returns the gradient of the bias.
    """

    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    mask: Tensor | None = None
    slopes: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    start: Tensor | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    bias_grad: bool = False


class Result(NamedTuple):
    """What a kernel's forward hands to its backward, besides its inputs.

    Attributes:
        output: (B, H, S, V).
        logsumexp: of the scores of each query, in the kernel's layout.
        seed, offset: of the random numbers of dropout.
    """

    output: Tensor
    logsumexp: Tensor | None = None
    seed: Tensor | None = None
    offset: Tensor | None = None


class Grads(NamedTuple):
    """What backward of a kernel returns that computes more than the gradients of heads.

    Attributes:
        q, k, v: of the heads.
        sinks: of the sinks, if the kernel has them.
        bias: of the bias if it was asked for, in its shape or in another that was broadcast to.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    bias: Tensor | None = None


class Kernel(NamedTuple):
    """An existing kernel for attention.

    Attributes:
        refusal: why it does not take a request, or None if it does.
        forward: the :class:`Result` for heads and call.
        backward: (dq, dk, dv) for the gradient of the output, heads, result and call, and perhaps
            what nobody reads; :class:`Grads` from those that take sinks or gradients of a bias.
        grouped: whether it takes fewer key heads than query heads.
        reads_output: whether its backward reads the output.
        has_sinks: whether it computes sinks itself; :mod:`.sinks` adds them to others.
        prepare: for heads, call and whether backward will run, does what has to be done once for
            calls of their kind, such as compiling; returns why the kernel cannot take them, or
            None.
    """

    refusal: Callable[[Request], str | None]
    forward: Callable[[Heads, Call], Result]
    backward: Callable[[Tensor, Heads, Result, Call], Any]
    grouped: bool = True
    reads_output: bool = True
    has_sinks: bool = False
    prepare: Callable[[Heads, Call, bool], str | None] | None = None


class Request(NamedTuple):
    """What the choice of a kernel depends on; hashable, without sizes that data sets.

    Attributes:
        queries, keys: 0, 1, or representatives of longer lengths that compare as these do.
        heads, kv_heads, head_dim, v_head_dim: sizes H, K, D, V.
        differentiable: whether backward will run.
        window, softcap, mask, alibi, varlen, dropout, sinks: whether the call has them.
        additive: whether the mask holds numbers.
        bias: whether there is a bias; then there is an additive mask, which it is part of.
        bias_grad: whether backward returns its gradient.
        traced: whether the tensors stand for others, as while torch.compile traces.
        enabled: what ``torch.backends.cuda`` allows: flash, efficient, cuDNN.
    """

    device: torch.device
    dtype: torch.dtype
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    causal: bool
    differentiable: bool
    window: bool = False
    softcap: bool = False
    mask: bool = False
    additive: bool = False
    alibi: bool = False
    varlen: bool = False
    dropout: bool = False
    sinks: bool = False
    bias: bool = False
    bias_grad: bool = False
    empty: bool = False
    traced: bool = False
    enabled: tuple[bool, bool, bool] = (True, True, True)

    @property
    def aligned(self) -> bool:
        """Whether causality is the same counted from the first and from the last key."""
        return not self.causal or self.queries == self.keys

    @property
    def is_plain(self) -> bool:
        """Whether torch's scaled_dot_product_attention can express it without a mask."""
        others = self.window, self.softcap, self.mask, self.alibi, self.varlen
        return self.aligned and not any(others)


_SOME = 64  # of queries or keys; which kernels take them does not depend on the number


def _lengths(queries: int, keys: int) -> tuple[int, int]:
    """Representatives of the lengths; compared without arithmetic, for they may be symbolic."""
    if queries < 2 and keys < 2:
        return int(queries), int(keys)
    if queries == keys:
        return _SOME, _SOME
    s = 0 if queries == 0 else 1 if queries == 1 else _SOME
    t = 0 if keys == 0 else 1 if keys == 1 else _SOME
    return (s, t) if s != t else (s, 2 * t) if queries < keys else (2 * s, t)


# Dynamo of torch 2.11 traces none of these questions within an autograd function.
@internals.constant_result
def enabled_kernels(device: torch.device) -> tuple[bool, bool, bool]:
    """What ``torch.backends.cuda`` allows: flash, efficient, cuDNN."""
    if device.type != "cuda":
        return True, True, True
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()


def request_of(x: Heads, call: Call, differentiable: bool) -> Request:
    """The request that a call of these heads is."""
    q, k, v = x
    batch, heads, queries, head_dim = q.shape
    lengths = _lengths(queries, k.shape[2])
    biased = call.bias is not None
    dropout = False
    if call.dropout_p > 0:  # Dynamo may take the number, and so the comparison, for a symbol
        dropout = True
    return Request(
        q.device,
        q.dtype,
        *lengths,
        heads,
        k.shape[1],
        fixed(head_dim),
        fixed(v.shape[3]),
        call.causal,
        differentiable,
        call.window is not None,
        call.softcap is not None,
        biased or call.mask is not None,
        biased or (call.mask is not None and call.mask.dtype != torch.bool),
        call.slopes is not None,
        call.cu_seqlens is not None,
        dropout,
        call.sinks is not None,
        biased,
        call.bias_grad,
        batch == 0 or 0 in lengths,
        stands_in(q),
        enabled_kernels(q.device),
    )


def mask_of(call: Call) -> Tensor | None:
    """The mask and the bias of a call as one mask."""
    mask, bias = call.mask, call.bias
    if mask is None or bias is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def additive(mask: Tensor, dtype: torch.dtype, hidden: float = -torch.inf) -> Tensor:
    """The mask as what is added to scores; ``hidden`` stands for False."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, hidden)


def hiding(mask: Tensor | None, hidden: Tensor) -> Tensor:
    """The mask, bool or additive, with which no query sees keys that are ``hidden`` (S, T)."""
    if mask is None:
        return ~hidden[None, None]
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, -torch.inf)

"""Rotary embedding and norm of queries and keys in plain torch: the path of a CPU.

Dimensions: N sequences of T = period tokens, H heads: queries, keys, values; A active ones, which
are queries and keys; D entries per head, P pairs that turn. Arithmetic is in fp32, in fp64 for
fp64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.tracing import columns, functional, joined_columns
from .cpu_blocks import at_once
from .scalar import cast, wide_dtype
from .tiling import empty_contiguous

# Elements per thread that a core's cache holds along with the intermediate results. One thread
# takes 46 instead of 163 ms for 4096 tokens of 24 heads of 128 in bf16; with fewer than a few
# blocks there is nothing to gain.
_BLOCK = 2**17
_MIN_BLOCKS = 4
_WHOLE = slice(None)


class Rotation(NamedTuple):
    """By which angles tokens turn, and what a pair is.

    Attributes:
        cos, sin: (period or more, P), in fp32 (fp64 for fp64).
        period: row r turns by the angles in row ``r % period``.
        interleaved: whether a pair consists of neighbours; else of an entry of each half of the
            part that turns.
    """

    cos: Tensor
    sin: Tensor
    period: int
    interleaved: bool


class NormedHeads(NamedTuple):
    """Normalised queries and keys with the values, and ``1 / sqrt(mean(x²) + eps)`` (…, A)."""

    y: Tensor
    rstd: Tensor


class QKNormGrads(NamedTuple):
    """Gradients of the input and of both weights, None where they were not wanted."""

    dx: Tensor | None
    dq_weight: Tensor | None
    dk_weight: Tensor | None


def rotary(x: Tensor, rotation: Rotation, kv_heads: int, head_dim: int, back: bool) -> Tensor:
    """Queries and keys turned by the angles, or back by them; and the values."""
    period, interleaved = rotation.period, rotation.interleaved
    y = empty_contiguous(x)
    if not y.numel():
        return y
    if functional():
        *turning, values = _apart(x, period, kv_heads, head_dim)
        return _together(x, [*[_turned(heads, rotation, back) for heads in turning], values])
    xs = _heads(x, period, head_dim)
    sizes = [xs.shape[2] - kv_heads, kv_heads]
    ys = _heads(y, period, head_dim)
    parts = xs.split_with_sizes(sizes, 2), ys.split_with_sizes(sizes, 2)
    cos, sin = _angles(rotation)
    for block in _blocks(xs):
        if block == _WHOLE:  # a view takes a microsecond or two: there are none of all there is
            (qk, v), (qk_out, v_out), angles = *parts, (cos, sin)
        else:
            (qk, v), (qk_out, v_out) = [[t[:, block] for t in own] for own in parts]
            angles = cos[block], sin[block]
        v_out.copy_(v)
        _turn(qk_out, cast(qk, cos.dtype), *angles, interleaved, back)
    return y


def qk_norm(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotation: Rotation | None,
    kv_heads: int,
    eps: float,
    zero_centered: bool,
) -> NormedHeads:
    """Queries and keys normalised, and turned if there is a rotation."""
    head_dim = q_weight.shape[0]
    active, dtype = x.shape[-1] // head_dim - kv_heads, wide_dtype(x.dtype)
    y = empty_contiguous(x)
    rstd = x.new_empty((*x.shape[:-1], active), dtype=dtype)
    if not y.numel():
        return NormedHeads(y, rstd)
    period = _count(x) if rotation is None else rotation.period
    if functional():
        *turning, values = _apart(x, period, kv_heads, head_dim)
        turned, norms = [], []
        for heads, weight in zip(turning, (q_weight, k_weight)):
            wide, scale = cast(heads, dtype), cast(weight, dtype)
            norm = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            wide = wide * norm * (scale + 1 if zero_centered else scale)
            turned.append(_turned(wide, rotation, False, x.dtype))
            norms.append(norm.reshape(*x.shape[:-1], -1))
        return NormedHeads(_together(x, [*turned, values]), joined_columns(norms))
    angles = None if rotation is None else _angles(rotation)
    xs = _heads(x, period, head_dim)
    scales = _scales(q_weight, k_weight, active - kv_heads, kv_heads, dtype, zero_centered)
    ys = _heads(y, period, head_dim)
    rstds = rstd.view(-1, period, active, 1)
    for block in _blocks(xs):
        ys[:, block, active:].copy_(xs[:, block, active:])
        qk = cast(xs[:, block, :active], dtype)
        norm = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
        rstds[:, block].copy_(norm.square_().mul_(1 / head_dim).add_(eps).rsqrt_())
        qk = (qk * norm).mul_(scales)
        if rotation is None or angles is None:
            ys[:, block, :active].copy_(qk)
        else:
            cos, sin = angles
            _turn(ys[:, block, :active], qk, cos[block], sin[block], rotation.interleaved, False)
    return NormedHeads(y, rstd)


def qk_norm_backward(
    dy: Tensor,
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rstd: Tensor,
    rotation: Rotation | None,
    zero_centered: bool,
    want_dx: bool,
    want_dw: bool,
) -> QKNormGrads:
    """Gradients of x and of the weights, as far as they are wanted.

    With g the gradient turned back, ``h = x rstd`` and ``dh = g w``: ``dw = Σ g h`` and
    ``dx = rstd (dh - h mean(dh h))``.
    """
    head_dim, active = q_weight.shape[0], rstd.shape[-1]
    queries = 2 * active - x.shape[-1] // head_dim
    if functional():
        return _qk_norm_backward_traced(
            dy, x, (q_weight, k_weight), rstd, rotation, zero_centered, want_dx, want_dw
        )
    dx = empty_contiguous(x) if want_dx else None
    sums = torch.zeros((active, head_dim), dtype=rstd.dtype, device=x.device)
    if x.numel():
        period = _count(x) if rotation is None else rotation.period
        angles = None if rotation is None else _angles(rotation)
        dys, xs = _heads(dy, period, head_dim), _heads(x, period, head_dim)
        dxs = None if dx is None else _heads(dx, period, head_dim)
        rstds = rstd.reshape(-1, period, active, 1)
        scales = _scales(q_weight, k_weight, queries, active - queries, rstd.dtype, zero_centered)
        for block in _blocks(xs):
            dqk = dys[:, block, :active]
            if rotation is None or angles is None:
                g = dqk.to(rstd.dtype, copy=True)
            else:
                cos, sin = angles
                g = torch.empty(dqk.shape, dtype=rstd.dtype, device=x.device)
                wide = cast(dqk, rstd.dtype)
                _turn(g, wide, cos[block], sin[block], rotation.interleaved, True)
            h = xs[:, block, :active] * rstds[:, block]
            gh = g * h
            if want_dw:
                sums += gh.sum((0, 1))
            if dxs is not None:
                dxs[:, block, active:].copy_(dys[:, block, active:])
                mean = gh.mul_(scales).mean(-1, keepdim=True)
                dh = g.mul_(scales).addcmul_(h, mean, value=-1)
                dxs[:, block, :active].copy_(dh.mul_(rstds[:, block]))
    dq = dk = None
    if want_dw:
        dq = cast(sums[:queries].sum(0), q_weight.dtype)
        dk = cast(sums[queries:].sum(0), k_weight.dtype)
    return QKNormGrads(dx, dq, dk)


def _qk_norm_backward_traced(
    dy: Tensor,
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    rstd: Tensor,
    rotation: Rotation | None,
    zero_centered: bool,
    want_dx: bool,
    want_dw: bool,
) -> QKNormGrads:
    """The same without ``out``, for queries and for keys."""
    head_dim, active = weights[0].shape[0], rstd.shape[-1]
    kv_heads = x.shape[-1] // head_dim - active
    period = _count(x) if rotation is None else rotation.period
    *dqk, dv = _apart(dy, period, kv_heads, head_dim)
    *qk, _ = _apart(x, period, kv_heads, head_dim)
    rstds = columns(rstd, [active - kv_heads, kv_heads])
    dxs, dws = [], []
    for grad, heads, factors, weight in zip(dqk, qk, rstds, weights):
        g = _turned(cast(grad, rstd.dtype), rotation, True)
        norm = factors.reshape(-1, period, heads.shape[2], 1)
        h, scale = heads * norm, cast(weight, rstd.dtype)
        dws.append(cast((g * h).sum((0, 1, 2)), weight.dtype) if want_dw else None)
        dh = g * (scale + 1 if zero_centered else scale)
        dxs.append(cast(norm * (dh - h * (dh * h).mean(-1, keepdim=True)), x.dtype))
    return QKNormGrads(_together(x, [*dxs, dv]) if want_dx else None, *dws)


def _count(x: Tensor) -> int:
    # Not by numel() of a torch.Size: a tracer would take it to be fixed.
    return math.prod(x.shape[:-1])


def _heads(packed: Tensor, period: int, head_dim: int) -> Tensor:
    return packed.reshape(-1, period, packed.shape[-1] // head_dim, head_dim)


def _apart(packed: Tensor, period: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """Heads of the queries, of the keys, and of the values; all as queries where there are none."""
    heads = packed.shape[-1] // head_dim
    sizes = [heads - 2 * kv_heads, kv_heads, kv_heads] if kv_heads else [heads, 0]
    parts = columns(packed, [size * head_dim for size in sizes])
    return [t.reshape(-1, period, size, head_dim) for t, size in zip(parts, sizes)]


def _together(packed: Tensor, parts: list[Tensor]) -> Tensor:
    """The inverse, of the shape of ``packed``."""
    *leading, _ = packed.shape
    flat = [cast(t, packed.dtype).reshape(*leading, t.shape[2] * t.shape[3]) for t in parts]
    return joined_columns(flat)


def _blocks(heads: Tensor) -> list[slice]:
    """Tokens to work on at a time."""
    if at_once(heads, _BLOCK):
        return [_WHOLE]
    block = _BLOCK * torch.get_num_threads()
    if heads.numel() < _MIN_BLOCKS * block:
        return [_WHOLE]
    period = heads.shape[1]
    step = max(1, block * period // heads.numel())
    return [slice(start, start + step) for start in range(0, period, step)]


def _angles(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (T, 1, P), for the heads to share."""
    period, cos, sin = rotation.period, rotation.cos, rotation.sin
    if cos.shape[0] != period:
        cos, sin = cos[:period], sin[:period]
    return cos.unsqueeze(1), sin.unsqueeze(1)


def _turn(
    dst: Tensor, src: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> None:
    """Writes heads with their pairs turned to ``dst``; ``src`` is in the dtype of the angles."""
    if dst.dtype != src.dtype:
        wide = src.new_empty(src.shape)
        _turn(wide, src, cos, sin, interleaved, back)
        dst.copy_(wide)
        return
    size = 2 * cos.shape[-1]
    if size < src.shape[-1]:
        dst[..., size:].copy_(src[..., size:])
    if interleaved and _holds_complex(src) and _holds_complex(dst):
        # A fifth of the time of the formula on every other entry.
        z, turned = (
            torch.view_as_complex(t[..., :size].unflatten(-1, (-1, 2))) for t in (src, dst)
        )
        torch.mul(z, torch.complex(cos, -sin if back else sin), out=turned)
        return
    a, b = _pairs(src, size, interleaved)
    a_out, b_out = _pairs(dst, size, interleaved)
    sign = -1 if back else 1
    torch.mul(a, cos, out=a_out).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=b_out).addcmul_(a, sin, value=sign)


def _turned(
    heads: Tensor, rotation: Rotation | None, back: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Heads with their pairs turned, in a new tensor, of their own dtype unless one is given."""
    dtype = dtype or heads.dtype
    if rotation is None:
        return cast(heads, dtype)
    cos, sin = _angles(rotation)
    size, interleaved = 2 * cos.shape[-1], rotation.interleaved
    a, b = _pairs(cast(heads, cos.dtype), size, interleaved)
    sin = -sin if back else sin
    # Rounded before they are joined: a compiler would store the wide ones.
    a, b = cast(a * cos - b * sin, dtype), cast(b * cos + a * sin, dtype)
    parts = [torch.stack([a, b], -1).flatten(-2)] if interleaved else [a, b]
    rest = [cast(heads[..., size:], dtype)] if size < heads.shape[-1] else []
    return torch.cat([*parts, *rest], -1)


def _pairs(heads: Tensor, size: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return heads[..., 0:size:2], heads[..., 1:size:2]
    a, b = (heads if size == heads.shape[-1] else heads[..., :size]).chunk(2, -1)
    return a, b


def _holds_complex(t: Tensor) -> bool:
    """Whether neighbours, taken in pairs, can be seen as complex numbers."""
    if t.storage_offset() % 2 or t.stride(-1) != 1:
        return False
    return all(stride % 2 == 0 for stride in t.stride()[:-1])


def _scales(
    q_weight: Tensor,
    k_weight: Tensor,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    zero_centered: bool,
) -> Tensor:
    """What each head is multiplied by, (A, D)."""
    weights = (cast(q_weight, dtype).expand(queries, -1), cast(k_weight, dtype).expand(keys, -1))
    scales = torch.cat(weights)
    return scales + 1 if zero_centered else scales

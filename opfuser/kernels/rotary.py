"""Rotary embedding of packed queries and keys, their norm per head, and both in one pass.

Dimensions: R rows (tokens), H heads of a row: the queries, the keys, the values. Queries and keys
are active, values are copied. D entries per head, P pairs of them that turn.

The row of a token lies in ``(*leading, H D)``. ``cos`` and ``sin`` are ``(period or more, P)``, in
fp32 (fp64 for fp64): row r turns by the angles in row ``r % period``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from . import rotary_plain
from .launch import Launch, multiprocessors
from .operators import operator
from .rows import add_up, cdiv, rows_of

__all__ = ["qk_norm", "qk_norm_backward", "rotary"]

# The knobs. A thread has 16 elements of a tile: with 2 bytes each two accesses of 16 bytes.
_PER_WARP = 512
# Warps of all programs, per multiprocessor. A program goes on to further rows, to load its weights
# once for several. There are some times as many as fit at once (36 and 20, by registers), for tiles
# of values are done sooner than others. Backward of Qwen3 8B takes 79.7 us on an H200, 0.94 of a
# copy; with 20, 40 and 80 it takes 86, 82 and 88.
_FORWARD_WARPS = 128
_BACKWARD_WARPS = 32
# Backward of heads wider than 128 takes 8 warps per program: few programs, which fetch their tiles
# ahead. 0.89 of a copy for heads of 256, else 0.82; heads of 128 lose up to 12 %.
_WIDE_AHEAD = 3
# Rows of a program at least: each leaves a row of sums for the weights behind.
_BACKWARD_ROWS = 4
# A thread of a wider head would have too many elements.
_WIDEST_HEAD = 4096


class _Shape(NamedTuple):
    """All that a launch depends on besides what it does."""

    queries: int
    keys: int
    values: int
    head_dim: int
    pairs: int
    interleaved: bool


class _Plan(NamedTuple):
    """A launch and how it covers a row: tiles of queries, of keys, of values."""

    launch: Launch
    q_tiles: int
    k_tiles: int
    v_tiles: int

    def lines(self, x: Tensor, most: int, warps: int, tiles: int) -> int:
        """Programs along the rows, for so many warps per multiprocessor."""
        programs = warps // self.launch.num_warps * multiprocessors(x)
        return min(most, max(1, programs // tiles))


def _plan(
    function: str, shape: _Shape, flags: dict[str, bool], *, norm: bool, ahead: int = 1
) -> _Plan:
    """The rule: more threads than a weight or a row of a table has elements.

    Then Triton has each thread load those that it needs, and else passes them on through shared
    memory. Where a row has fewer heads of a kind than fit, a tile takes those of several rows: with
    2 keys to 32 queries 0.62 of a copy, instead of 0.50 with tiles of keys that are not full.
    Without norm there is nothing to tell queries, keys and values apart by: tiles hold all.
    """
    queries, keys, values, head_dim, pairs, _ = shape
    tail = head_dim - 2 * pairs
    block_p, block_t = _power_of_2(pairs), _power_of_2(tail)
    num_warps = min(8, max(2, _power_of_2(max(block_p, block_t) // 32 + 1)))
    heads = queries + keys + values
    counted = (queries, keys) if norm else (heads, 0)
    room = max(1, num_warps * _PER_WARP // (2 * block_p + block_t * (tail > 0)))
    block_h = 1 << (room.bit_length() - 1)
    if not norm:
        block_h = min(block_h, _power_of_2(heads))
    at_once = [min(block_h, _power_of_2(count)) for count in counted]
    q_tiles, k_tiles = (cdiv(count, some) for count, some in zip(counted, at_once))
    room_v = num_warps * _PER_WARP
    block_v = min(room_v, _power_of_2(values * head_dim))
    constants = {
        "QUERIES": counted[0],
        "ACTIVE": queries + keys,
        "HEADS": heads,
        "Q_TILES": q_tiles,
        "K_TILES": k_tiles,
        **flags,
        "HEAD_DIM": head_dim,
        "PAIRS": pairs,
        "INTERLEAVED": shape.interleaved,
        "BLOCK_H": block_h,
        "BLOCK_P": block_p,
        "BLOCK_T": block_t,
        "BLOCK_V": block_v,
        "Q_ROWS": block_h // at_once[0],
        "K_ROWS": block_h // at_once[1],
        "V_ROWS": room_v // block_v,
        "AHEAD": ahead,
    }
    v_tiles = cdiv(values * head_dim, block_v) if norm else 0
    return _Plan(Launch(function, constants, num_warps=num_warps), q_tiles, k_tiles, v_tiles)


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def _turn(shape: _Shape, back: bool) -> _Plan:
    return _plan("rotary:forward", shape, {"BACK": back, "ZERO_CENTERED": False}, norm=False)


@functools.cache
def _norm(shape: _Shape, zero_centered: bool) -> _Plan:
    flags = {"BACK": False, "ZERO_CENTERED": zero_centered}
    return _plan("rotary:forward", shape, flags, norm=True)


@functools.cache
def _norm_backward(shape: _Shape, zero_centered: bool) -> _Plan:
    ahead = _WIDE_AHEAD if shape.head_dim > 128 else 1
    flags = {"ZERO_CENTERED": zero_centered}
    return _plan("rotary:norm_backward", shape, flags, norm=True, ahead=ahead)


def _count(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _rotary_launch(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    period: int,
    kv_heads: int,
    head_dim: int,
    interleaved: bool,
    back: bool,
) -> Tensor:
    if head_dim > _WIDEST_HEAD:
        return rotary_plain.rotary(x, cos, sin, period, kv_heads, head_dim, interleaved, back)
    queries = x.shape[-1] // head_dim - 2 * kv_heads
    shape = _Shape(queries, kv_heads, kv_heads, head_dim, cos.shape[1], interleaved)
    plan, rows = _turn(shape, back), _count(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, stride = rows_of(x)
    tensors = (x, y, cos, sin, None, None, None)
    plan.launch((rows, plan.q_tiles, 1), tensors, (rows, stride, period), (0.0,))
    return y


def _qk_norm_launch(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    period: int,
    kv_heads: int,
    interleaved: bool,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    head_dim = q_weight.shape[0]
    if head_dim > _WIDEST_HEAD:
        return rotary_plain.qk_norm(
            x, q_weight, k_weight, cos, sin, period, kv_heads, interleaved, eps, zero_centered
        )
    pairs = head_dim // 2 if cos is None else cos.shape[1]
    queries = x.shape[-1] // head_dim - 2 * kv_heads
    plan = _norm(_Shape(queries, kv_heads, kv_heads, head_dim, pairs, interleaved), zero_centered)
    rows, tiles = _count(x), plan.q_tiles + plan.k_tiles + plan.v_tiles
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty((*x.shape[:-1], queries + kv_heads), dtype=torch.float32, device=x.device)
    lines = plan.lines(x, rows, _FORWARD_WARPS, tiles)
    x, stride = rows_of(x)
    tensors = (x, y, cos, sin, q_weight.contiguous(), k_weight.contiguous(), rstd)
    plan.launch((lines, tiles, 1), tensors, (rows, stride, period), (eps,))
    return y, rstd


def _qk_norm_backward_launch(
    dy: Tensor,
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rstd: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    period: int,
    interleaved: bool,
    zero_centered: bool,
    want_dx: bool,
    want_dw: bool,
) -> list[Tensor]:
    head_dim, rows = q_weight.shape[0], _count(x)
    if head_dim > _WIDEST_HEAD or not rows:
        return rotary_plain.qk_norm_backward(
            dy, x, q_weight, k_weight, rstd, cos, sin, period, interleaved, zero_centered, want_dx,
            want_dw,
        )  # fmt: skip
    pairs = head_dim // 2 if cos is None else cos.shape[1]
    active = rstd.shape[-1]
    kv_heads = x.shape[-1] // head_dim - active
    shape = _Shape(active - kv_heads, kv_heads, kv_heads, head_dim, pairs, interleaved)
    plan = _norm_backward(shape, zero_centered)
    tiles = plan.q_tiles + plan.k_tiles + plan.v_tiles * want_dx
    lines = plan.lines(x, cdiv(rows, _BACKWARD_ROWS), _BACKWARD_WARPS, tiles)
    counts = plan.q_tiles * lines, plan.k_tiles * lines
    results, dx, partial = [], None, None
    if want_dx:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        results.append(dx)
    if want_dw:
        partial = torch.empty((sum(counts), head_dim), dtype=torch.float32, device=x.device)
    dy, dy_stride = rows_of(dy)
    x, x_stride = rows_of(x)
    weights = q_weight.contiguous(), k_weight.contiguous()
    tensors = (dy, x, dx, cos, sin, *weights, rstd.contiguous(), partial)
    plan.launch((lines, tiles, 1), tensors, (rows, dy_stride, x_stride, period))
    if partial is not None:
        dws = [torch.empty(w.shape, dtype=w.dtype, device=x.device) for w in weights]
        add_up(partial, dws, counts)
        results += dws
    return results


rotary = operator(
    "rotary(Tensor x, Tensor cos, Tensor sin, SymInt period, int kv_heads, int head_dim,"
    " bool interleaved, bool back) -> Tensor",
    launch=_rotary_launch,
    plain=rotary_plain.rotary,
)
qk_norm = operator(
    "qk_norm(Tensor x, Tensor q_weight, Tensor k_weight, Tensor? cos, Tensor? sin, SymInt period,"
    " int kv_heads, bool interleaved, float eps, bool zero_centered) -> (Tensor, Tensor)",
    launch=_qk_norm_launch,
    plain=rotary_plain.qk_norm,
)
qk_norm_backward = operator(
    "qk_norm_backward(Tensor dy, Tensor x, Tensor q_weight, Tensor k_weight, Tensor rstd,"
    " Tensor? cos, Tensor? sin, SymInt period, bool interleaved, bool zero_centered, bool want_dx,"
    " bool want_dw) -> Tensor[]",
    launch=_qk_norm_backward_launch,
    plain=rotary_plain.qk_norm_backward,
)

"""Rotary embedding of packed queries and keys, their norm per head, and both in one pass.

Dimensions: R rows (tokens), H heads of a row: the queries, the keys, the values. Queries and keys
are active, values are copied. D entries per head, P pairs of them that turn. The row of a token
lies in ``(*leading, H D)``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import rotary_plain as plain
from .choice import kernel_or_plain
from .column_sums import sum_columns
from .launch import Launch, multiprocessors
from .rotary_plain import NormedHeads, QKNormGrads, Rotation
from .tiling import cdiv, empty_contiguous, power_of_two, rows_of


@dataclass(frozen=True)
class _Rule:
    """How heads are cut into tiles, and programs take them. Figures are those of an H200.

    Attributes:
        elements_per_warp: of a tile.
        forward_warps: of all programs on a multiprocessor, in forward with norm.
        backward_warps: the same in backward.
        min_backward_rows: that a program takes at least.
        wide_head: entries of a head from which backward fetches its tiles ahead.
        wide_ahead: how many tiles are under way then.
        widest_head: entries of a head that a kernel takes.
    """

    # 16 per thread: with 2 bytes each two accesses of 16 bytes.
    elements_per_warp: int = 512
    # A program goes on to further rows, to load its weights once for several. There are some times
    # as many as fit at once (36 and 20, by registers), for tiles of values are done sooner than
    # others.
    forward_warps: int = 128
    # Backward of Qwen3 8B takes 79.7 us, 0.94 of a copy; with 20, 40 and 80 it takes 86, 82 and 88.
    backward_warps: int = 32
    # Each leaves a row of sums for the weights behind.
    min_backward_rows: int = 4
    # Wider heads take 8 warps per program: few programs, which fetch their tiles ahead. 0.89 of a
    # copy for heads of 256, else 0.82; heads of 128 lose up to 12 %.
    wide_head: int = 129
    wide_ahead: int = 3
    # A thread of a wider head would have too many elements.
    widest_head: int = 4096


_RULE = _Rule()


class _Shape(NamedTuple):
    """All that a launch depends on besides what it does."""

    queries: int
    keys: int
    values: int
    head_dim: int
    pairs: int
    interleaved: bool


@dataclass(frozen=True)
class _HeadsLaunch:
    """A launch and how it covers a row: tiles of queries, of keys, of values."""

    launch: Launch
    q_tiles: int
    k_tiles: int
    v_tiles: int

    def row_programs(self, x: Tensor, most: int, warps: int, tiles: int) -> int:
        """Programs along the rows, for so many warps per multiprocessor."""
        programs = warps // self.launch.num_warps * multiprocessors(x)
        return min(most, max(1, programs // tiles))


def _launch(
    function: str, shape: _Shape, flags: dict[str, bool], *, norm: bool, ahead: int = 1
) -> _HeadsLaunch:
    """A launch with more threads than a weight or a row of a table has elements.

    Then Triton has each thread load those that it needs, and else passes them on through shared
    memory. Where a row has fewer heads of a kind than fit, a tile takes those of several rows: with
    2 keys to 32 queries 0.62 of a copy, instead of 0.50 with tiles of keys that are not full.
    Without norm there is nothing to tell queries, keys and values apart by: tiles hold all.
    """
    queries, keys, values, head_dim, pairs, _ = shape
    tail = head_dim - 2 * pairs
    block_p, block_t = power_of_two(pairs), power_of_two(tail)
    num_warps = min(8, max(2, power_of_two(max(block_p, block_t) // 32 + 1)))
    heads = queries + keys + values
    counted = (queries, keys) if norm else (heads, 0)
    room = max(1, num_warps * _RULE.elements_per_warp // (2 * block_p + block_t * (tail > 0)))
    block_h = 1 << (room.bit_length() - 1)
    if not norm:
        block_h = min(block_h, power_of_two(heads))
    at_once = [min(block_h, power_of_two(count)) for count in counted]
    q_tiles, k_tiles = (cdiv(count, some) for count, some in zip(counted, at_once))
    room_v = num_warps * _RULE.elements_per_warp
    block_v = min(room_v, power_of_two(values * head_dim))
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
    return _HeadsLaunch(Launch(function, constants, num_warps=num_warps), q_tiles, k_tiles, v_tiles)


@functools.cache
def _turn_launch(shape: _Shape, back: bool) -> _HeadsLaunch:
    return _launch("rotary:forward", shape, {"BACK": back, "ZERO_CENTERED": False}, norm=False)


@functools.cache
def _norm_launch(shape: _Shape, zero_centered: bool) -> _HeadsLaunch:
    flags = {"BACK": False, "ZERO_CENTERED": zero_centered}
    return _launch("rotary:forward", shape, flags, norm=True)


@functools.cache
def _norm_backward_launch(shape: _Shape, zero_centered: bool) -> _HeadsLaunch:
    ahead = _RULE.wide_ahead if shape.head_dim >= _RULE.wide_head else 1
    flags = {"ZERO_CENTERED": zero_centered}
    return _launch("rotary:norm_backward", shape, flags, norm=True, ahead=ahead)


def _count(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _launch_rotary(
    x: Tensor, rotation: Rotation, kv_heads: int, head_dim: int, back: bool
) -> Tensor:
    cos, sin, period, interleaved = rotation
    queries = x.shape[-1] // head_dim - 2 * kv_heads
    shape = _Shape(queries, kv_heads, kv_heads, head_dim, cos.shape[1], interleaved)
    heads, rows = _turn_launch(shape, back), _count(x)
    y = empty_contiguous(x)
    x, stride = rows_of(x)
    tensors = (x, y, cos, sin, None, None, None)
    heads.launch((rows, heads.q_tiles, 1), tensors, (rows, stride, period), (0.0,))
    return y


def _launch_qk_norm(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotation: Rotation | None,
    kv_heads: int,
    eps: float,
    zero_centered: bool,
) -> NormedHeads:
    head_dim = q_weight.shape[0]
    queries = x.shape[-1] // head_dim - 2 * kv_heads
    shape, tables, period = _shape(queries, kv_heads, head_dim, rotation)
    heads = _norm_launch(shape, zero_centered)
    rows, tiles = _count(x), heads.q_tiles + heads.k_tiles + heads.v_tiles
    y = empty_contiguous(x)
    rstd = torch.empty((*x.shape[:-1], queries + kv_heads), dtype=torch.float32, device=x.device)
    programs = heads.row_programs(x, rows, _RULE.forward_warps, tiles)
    x, stride = rows_of(x)
    tensors = (x, y, *tables, q_weight.contiguous(), k_weight.contiguous(), rstd)
    heads.launch((programs, tiles, 1), tensors, (rows, stride, period), (eps,))
    return NormedHeads(y, rstd)


def _launch_qk_norm_backward(
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
    head_dim, rows, active = q_weight.shape[0], _count(x), rstd.shape[-1]
    kv_heads = x.shape[-1] // head_dim - active
    shape, tables, period = _shape(active - kv_heads, kv_heads, head_dim, rotation)
    heads = _norm_backward_launch(shape, zero_centered)
    tiles = heads.q_tiles + heads.k_tiles + heads.v_tiles * want_dx
    most = cdiv(rows, _RULE.min_backward_rows)
    programs = heads.row_programs(x, most, _RULE.backward_warps, tiles)
    counts = heads.q_tiles * programs, heads.k_tiles * programs
    dx = dq = dk = partial = None
    if want_dx:
        dx = empty_contiguous(x)
    if want_dw:
        partial = torch.empty((sum(counts), head_dim), dtype=torch.float32, device=x.device)
    dy, dy_stride = rows_of(dy)
    x, x_stride = rows_of(x)
    weights = q_weight.contiguous(), k_weight.contiguous()
    tensors = (dy, x, dx, *tables, *weights, rstd.contiguous(), partial)
    heads.launch((programs, tiles, 1), tensors, (rows, dy_stride, x_stride, period))
    if partial is not None:
        dq, dk = (torch.empty(w.shape, dtype=w.dtype, device=x.device) for w in weights)
        sum_columns(partial, (dq, dk), counts)
    return QKNormGrads(dx, dq, dk)


def _shape(
    queries: int, kv_heads: int, head_dim: int, rotation: Rotation | None
) -> tuple[_Shape, tuple[Tensor | None, Tensor | None], int]:
    """The shape, the tables, and after how many rows these repeat."""
    if rotation is None:
        shape = _Shape(queries, kv_heads, kv_heads, head_dim, head_dim // 2, False)
        return shape, (None, None), 0
    cos, sin, period, interleaved = rotation
    shape = _Shape(queries, kv_heads, kv_heads, head_dim, cos.shape[1], interleaved)
    return shape, (cos, sin), period


rotary = kernel_or_plain(
    launch=_launch_rotary,
    plain=plain.rotary,
    accepts=lambda x, rotation, kv_heads, head_dim, back: head_dim <= _RULE.widest_head,
)
qk_norm = kernel_or_plain(
    launch=_launch_qk_norm,
    plain=plain.qk_norm,
    accepts=lambda x, q_weight, *_: q_weight.shape[0] <= _RULE.widest_head,
)
qk_norm_backward = kernel_or_plain(
    launch=_launch_qk_norm_backward,
    plain=plain.qk_norm_backward,
    accepts=lambda dy, x, q_weight, *_: q_weight.shape[0] <= _RULE.widest_head and x.numel() > 0,
)

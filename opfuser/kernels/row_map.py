"""Tokens to the rows of their experts and back, each in one pass, without an atomic sum.

Dimensions: T tokens, k experts of each, R = T k rows, D columns, E experts. x and y are ``(…, D)``,
indices, weights and row map ``(…, k)``, rows ``(R, D)``. ATen's ``embedding_bag``, which adds up
rows in one pass too, took five times a copy of the same bytes on an H200, and gathers of tokens
twice; a sort, its inverse and counts are a dozen launches there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import explain
from ..runtime.recording import seen_whole
from . import row_map_plain as plain
from .choice import kernel_or_plain
from .gated import readable
from .launch import DTYPES, Launch
from .row_map_plain import RowMap
from .tiling import TiledLaunch, TileRule, cdiv, rows_of

__all__ = ["RowMap", "copy_to_rows", "sort_by_expert", "sum_of_rows", "sum_of_rows_grads"]

# As in kernels.gated: one access of 16 bytes by each thread.
_RULE = TileRule(tile_bytes=2048, warps=4)

# Entries of a comparison of indices with all experts, 16 of each thread.
_MATCHES = 2048
_MAX_EXPERTS = 1024
# Every program reads the histograms of all: 64 KiB for 128 experts.
_MAX_PROGRAMS = 128


@functools.lru_cache
def _sort_launches(experts: int) -> tuple[Launch, Launch, int]:
    width = 1 << (experts - 1).bit_length()
    block = _MATCHES // width
    constants = {"WIDTH": width, "BLOCK": block}
    places = Launch("row_map:places", {**constants, "PARTS": block})
    return Launch("row_map:histograms", constants), places, block


def _launch_sort(indices: Tensor, experts: int) -> RowMap:
    histograms, places, block = _sort_launches(experts)
    indices = indices.contiguous()
    count = indices.numel()
    share = max(4, cdiv(count, _MAX_PROGRAMS * block)) * block
    programs = max(1, cdiv(count, share))  # without tokens there are sizes too
    grid, ints = (programs, 1, 1), (count, share, experts)
    parts = indices.new_empty((programs, experts), dtype=torch.int32)
    histograms(grid, (indices, parts), ints)
    made = RowMap(
        torch.empty_like(indices, dtype=torch.int64),
        indices.new_empty(experts, dtype=torch.int64),
    )
    valid = indices.new_empty(1, dtype=torch.uint8)
    places(grid, (indices, parts, *made, valid), ints)
    _assert_all_experts(valid, experts)
    return made


@seen_whole(reads=True)  # who notes calls would take a function without results for a question
def _assert_all_experts(valid: Tensor, experts: int) -> None:
    """Fails on the device, without waiting for it, if an index was no expert's."""
    text = explain(plain.must_be_experts(experts), where="Permute")
    torch.ops.aten._assert_async.msg(valid, text)


@functools.lru_cache
def _tiled_launch(kernel: str, k: int, cols: int, itemsize: int) -> TiledLaunch:
    return _RULE.launch(f"row_map:{kernel}", {"K": k}, cols, itemsize)


def _launch_copies(
    x: Tensor, row_map: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    k, cols, count = row_map.shape[-1], x.shape[-1], row_map.numel()
    rows = x.new_empty((count, cols))
    row_weights = None if weights is None else weights.new_empty(count)
    tokens = count // max(k, 1)
    tiled = _tiled_launch("copies", k, cols, x.element_size())
    x, stride = rows_of(x)
    tensors = (x, row_map.contiguous(), rows, readable(weights), row_weights)
    tiled.launch((tiled.tiles(tokens, cols), 1, 1), tensors, (tokens, cols, stride))
    return rows, row_weights


def _launch_sums(
    rows: Tensor, row_map: Tensor, weights: Tensor | None, row_values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    *leading, k = row_map.shape
    cols, tokens = rows.shape[1], row_map.numel() // k
    y = rows.new_empty(*leading, cols)
    values = None if row_values is None else row_values.new_empty(row_map.shape)
    tiled = _tiled_launch("sums", k, cols, rows.element_size())
    rows, stride = rows_of(rows)
    tensors = (rows, row_map.contiguous(), y, readable(weights), readable(row_values), values)
    tiled.launch((tiled.tiles(tokens, cols), 1, 1), tensors, (tokens, cols, stride))
    return y, values


def _launch_grads(
    dy: Tensor, row_map: Tensor, weights: Tensor, rows: Tensor | None, want_drows: bool
) -> tuple[Tensor | None, Tensor | None]:
    k, cols, count = row_map.shape[-1], dy.shape[-1], row_map.numel()
    drows = dy.new_empty((count, cols)) if want_drows else None
    dweights = None if rows is None else weights.new_empty(weights.shape)
    tiled = _tiled_launch("weighted_backward", k, cols, dy.element_size())
    dy, stride = rows_of(dy)
    rows, rows_stride = (None, 0) if rows is None else rows_of(rows)
    tensors = (dy, row_map.contiguous(), readable(weights), rows, drows, dweights)
    ints = (count, cols, stride, rows_stride)
    tiled.launch((cdiv(count, tiled.block_rows), 1, 1), tensors, ints)
    return drows, dweights


def _takes(x: Tensor, row_map: Tensor, *others: Any) -> bool:
    tensors = (t for t in others if isinstance(t, Tensor))
    return x.shape[-1] > 0 and row_map.shape[-1] > 0 and all(t.dtype in DTYPES for t in tensors)


sort_by_expert = kernel_or_plain(
    launch=_launch_sort,
    plain=plain.sort,
    accepts=lambda indices, experts: experts <= _MAX_EXPERTS,
    dtypes=frozenset((torch.int32, torch.int64)),
)
copy_to_rows = kernel_or_plain(launch=_launch_copies, plain=plain.row_copies, accepts=_takes)
sum_of_rows = kernel_or_plain(
    launch=_launch_sums, plain=plain.row_sums, traced=plain.row_sums_traced, accepts=_takes
)
sum_of_rows_grads = kernel_or_plain(
    launch=_launch_grads, plain=plain.weighted_grads, accepts=_takes
)

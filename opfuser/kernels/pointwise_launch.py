"""What is launched for chains of element-wise operations, and by which rule.

Dimensions: R rows, which are all dimensions but the last, C columns, S slices of the rows, for
partial sums.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import pointwise_plain as plain
from .column_sums import sum_columns
from .launch import Launch
from .norm_launch import chain_forward_launch
from .pointwise_plain import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Link, Wants
from .tiling import TiledLaunch, TileRule

# Operands that the device functions take. Backward has at most one more than forward, for dx.
_POINTERS = 8
MAX_OPERANDS = _POINTERS - 1

# Shapes that do not matter to a chain are taken as rows of the largest power of two that divides
# the size, up to this: aligned, and no lane idle at the end of a row.
_MIN_WIDTH = 128
_MAX_WIDTH = 4096

# Shares are those of a device-to-device copy on an H200. Programs go down a block of columns and
# load biases once.
_RULE = TileRule(
    tile_bytes=2048,  # one access by each thread; with two, 0.96 instead of 1.06
    warps=4,
    programs=64,  # 1.06 for bias, SiLU, dropout and sum in bf16; with one tile per program 0.98
    ahead=1,
)
_SUMS = TileRule(
    tile_bytes=4096,  # twice as large as without sums
    warps=4,
    max_cols=64,  # 36.6 us for bias, SiLU, dropout and sum of 16384 x 1024; with 128 39.9, 256 39.1
    programs=8,
    min_rows=128,  # per partial sum, so that these are below 2% of the traffic
    ahead=1,
)
# Where values are recomputed from the input, and random numbers too, a program computes for longer
# than others load, and has to fetch its tiles ahead: 0.88 for the gradient of bias, GELU and
# dropout, else 0.58. Where only one is done, 0.93 without and 0.90 with that.
_BUSY_SUMS = replace(_SUMS, programs=16, ahead=3)

_IDENTITY = "@scalar:identity"


class BackwardLaunch(NamedTuple):
    """How the gradients that are wanted are computed.

    Attributes:
        tiled: what is launched; None where all of them are the gradient of the output.
        reads: links whose operands are read, in order.
        reads_x: whether values of the input are needed.
        written: dtypes of the gradients that are written. One serves all places of the chain
            between which nothing changes it.
        which: for each link, and the input at the end, which of these is its gradient; -1 for the
            output's, None for none.
        sums: the links of biases whose gradients are summed, the last one first.
    """

    tiled: TiledLaunch | None
    reads: tuple[int, ...]
    reads_x: bool
    written: tuple[torch.dtype, ...]
    which: tuple[int | None, ...]
    sums: tuple[int, ...]


def size_of(x: Tensor, by_rows: bool) -> tuple[int, int]:
    """R and C; if rows and columns do not matter, those of a shape that tiles fill."""
    size = x.numel()
    if not by_rows:
        width = min(size & -size, _MAX_WIDTH)
        if width >= _MIN_WIDTH:
            return size // width, width
    cols = x.shape[-1] if x.dim() else 1
    return size // cols if cols else 0, cols


def padded(pointers: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """All the operands that the device functions take."""
    return (*pointers, *(None,) * (_POINTERS - len(pointers)))


def launch_backward(
    tiled: TiledLaunch,
    dy: Tensor,
    x: Tensor | None,
    pointers: Sequence[Tensor | None],
    sums: Sequence[Tensor],
    size: tuple[int, int],
) -> None:
    """Fills in the gradients among the pointers, and those of biases."""
    rows, cols = size
    blocks, slices = tiled.slices(dy, rows, cols)
    parts = None
    if sums:
        parts = sums[0]
        if slices > 1 or len(sums) > 1:
            shape = len(sums), slices, cols
            parts = torch.empty(shape, dtype=torch.float32, device=dy.device)
    tensors = (dy, x, parts, *padded(pointers))
    tiled.launch((blocks * slices, 1, 1), tensors, (rows, cols, slices))
    if parts is not None and parts is not sums[0]:
        for i in range(0, len(sums), 2):
            pair = sums[i : i + 2]
            sum_columns(parts[i:], pair, (slices,) * len(pair))


def reads_of(links: Sequence[Link], first: int = -1) -> tuple[tuple[bool, ...], bool]:
    """Whether backward reads each operand, and the input.

    Args:
        first: the link to which backward goes; -1 is the input.
    """
    needed = False
    reads = []
    for i in reversed(range(len(links))):
        kind = links[i].kind
        needed = needed or (i > first and not links[i].linear)
        reads.append(kind == DROPOUT or (needed and kind != FUNCTION))
        needed = needed and kind != KEEP
    return tuple(reversed(reads)), needed


def choose_backward(
    links: Sequence[Link],
    wants: Wants,
    cols: int,
    dtype: torch.dtype,
    dtypes: Sequence[torch.dtype],
) -> BackwardLaunch:
    """Decides what backward reads and writes.

    Args:
        wants, dtypes: as in ``Chain.backward``.
        dtype: of the gradient of the output.
    """
    itemsize = dtype.itemsize
    n = len(links)
    first = -1 if wants[n] else min((i for i in range(n) if wants[i]), default=n)
    read, reads_x = reads_of(links, first)
    reads = tuple(i for i in range(n) if read[i])
    written: list[torch.dtype] = []
    which: list[int | None] = [None] * (n + 1)
    sums: list[int] = []
    results: dict[int, int] = {}
    current: int | None = -1
    for i in reversed(range(-1, n)):  # at -1, also in lists, stands the input
        kind = ADD if i < 0 else links[i].kind
        if wants[i] and kind == BIAS:
            results[i] = len(sums)
            sums.append(i)
        elif wants[i]:
            if current is None:
                current = len(written)
                written.append(dtype)
                results[i] = len(reads) + current
            which[i] = current
        if kind in (FUNCTION, DROPOUT):
            current = None
            dtype = dtypes[i] if kind == FUNCTION else dtype
    if not written and not sums:
        return BackwardLaunch(None, (), False, (), tuple(which), ())
    # The gradient of the input is written like that of something added before the first link.
    sources = {i: slot for slot, i in enumerate(reads)}
    before = ADD, -1, results.get(-1, -1), _IDENTITY
    encoded = before, *_encoded(links, sources, results, itemsize)
    busy = reads_x and any(links[i].kind == DROPOUT for i in reads)
    tiled = _backward(encoded, len(sums), busy, cols, itemsize)
    return BackwardLaunch(tiled, reads, reads_x, tuple(written), tuple(which), tuple(sums))


def choose_forward(links: Sequence[Link], cols: int, itemsize: int) -> TiledLaunch:
    """What runs the links."""
    return _forward(_encoded(links, _sources(links), {}, itemsize), cols, itemsize)


def choose_forward_norm(
    links: Sequence[Link], cols: int, itemsize: int, zero_centered: bool
) -> tuple[Launch, int]:
    """What runs the links and the norm of their result, and the rows of a program."""
    return _norm(_encoded(links, _sources(links), {}, itemsize), cols, zero_centered)


def _sources(links: Sequence[Link]) -> dict[int, int]:
    """For links that have an operand in forward, which one it is."""
    holders = [i for i, link in enumerate(links) if link.kind != FUNCTION]
    return {i: n for n, i in enumerate(holders)}


def _encoded(
    links: Sequence[Link], sources: dict[int, int], results: dict[int, int], itemsize: int
) -> tuple[tuple[Any, ...], ...]:
    """The links as device functions take them."""
    out = []
    for i, link in enumerate(links):
        parameters: tuple[float, ...] = link.parameters
        if link.kind == DROPOUT:
            (p,) = parameters
            parameters = plain.threshold(p), plain.rescale(p), itemsize == 2
        device = link.device or _IDENTITY
        out.append((link.kind, sources.get(i, -1), results.get(i, -1), device, *parameters))
    return tuple(out)


@functools.lru_cache(None)
def _forward(links: tuple[Any, ...], cols: int, itemsize: int) -> TiledLaunch:
    return _tiled_launch(_RULE, "forward", {"LINKS": _loaded(links)}, cols, itemsize)


@functools.lru_cache(None)
def _norm(links: tuple[Any, ...], cols: int, zero_centered: bool) -> tuple[Launch, int]:
    return chain_forward_launch(_loaded(links), cols, zero_centered)


@functools.lru_cache(None)
def _backward(
    links: tuple[Any, ...], biases: int, busy: bool, cols: int, itemsize: int
) -> TiledLaunch:
    rule = _RULE if not biases else _BUSY_SUMS if busy else _SUMS
    constants = {"LINKS": _loaded(links), "BIASES": biases}
    return _tiled_launch(rule, "backward", constants, cols, itemsize)


def _tiled_launch(
    rule: TileRule, direction: str, constants: dict[str, Any], cols: int, itemsize: int
) -> TiledLaunch:
    # Random numbers come in fours and eights.
    return rule.launch(f"pointwise:chain_{direction}", constants, cols, itemsize, min_cols=8)


def _loaded(links: tuple[Any, ...]) -> tuple[Any, ...]:
    """The links with functions from outside of this package imported."""
    return tuple((*link[:3], _function(link[3]), *link[4:]) for link in links)


def _function(device: Any) -> Any:
    if not isinstance(device, str) or device.startswith("@"):
        return device
    module, _, name = device.partition(":")
    return getattr(importlib.import_module(module), name)

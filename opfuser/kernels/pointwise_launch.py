"""What is launched for chains of element-wise stages, and by which rule.

Dimensions: R rows, which are all dimensions but the last, C columns, S slices of the rows, for
partial sums.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import pointwise_plain as plain
from .launch import Launch, multiprocessors
from .norm_launch import chain_forward_launch
from .pointwise_plain import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Stage, Wants
from .rows import add_up, cdiv, tile

__all__ = [
    "MAX_OPERANDS",
    "Gradients",
    "Tiled",
    "Wants",
    "forward_launch",
    "forward_norm_launch",
    "gradients",
    "launch_backward",
    "padded",
    "reads_of",
    "size_of",
]

# Operands that the device functions take. Backward has at most one more than forward, for dx.
_POINTERS = 8
MAX_OPERANDS = _POINTERS - 1

# Bytes of x per tile: one access of 16 bytes by each thread of 4 warps. Programs walk down a block
# of columns and load biases once; 64 of them per multiprocessor: on an H200 1.06 of a copy for
# bias, SiLU, dropout and sum in bf16, with one tile per program 0.98, with two accesses 0.96.
_BYTES = 2048
_WARPS = 4
_PROGRAMS = 64

# Shapes that do not matter to a chain are taken as rows of the largest power of two that divides
# the size, up to this: aligned, and no lane idle at the end of a row.
_MIN_WIDTH = 128
_MAX_WIDTH = 4096

# With sums over rows tiles are twice as large, of 64 columns, and there are at least 128 rows for
# each partial sum, so that these are below 2% of the traffic. The gradient of bias, SiLU, dropout
# and sum of 16384 x 1024 takes 36.6 us, with tiles of 128 columns 39.9, of 256 columns 39.1.
_SUM_BYTES = 4096
_SUM_COLS = 64
_SUM_ROWS = 128
_SUM_PROGRAMS = 8

# Where values are made from the input, and random numbers too, a program computes for longer than
# others load, and has to fetch its tiles ahead: 0.88 of a copy for the gradient of bias, GELU and
# dropout, else 0.58. Where only one is done, 0.93 without and 0.90 with that.
_BUSY_PROGRAMS = 16
_BUSY_AHEAD = 3

_IDENTITY = "@scalar:identity"


class Tiled(NamedTuple):
    """A launch, the size of its tiles, and how many programs a multiprocessor gets at most."""

    launch: Launch
    block_rows: int
    block_cols: int
    programs: int

    def covers(self, x: Tensor, rows: int, cols: int, least_rows: int = 1) -> tuple[int, int]:
        """Blocks of columns, and how many programs share the rows of each."""
        blocks = cdiv(cols, self.block_cols)
        programs = multiprocessors(x) * self.programs // max(1, blocks)
        slices = min(cdiv(rows, max(least_rows, self.block_rows)), programs)
        return blocks, max(1, slices)


class Gradients(NamedTuple):
    """How the gradients that are wanted are made.

    Attributes:
        tiled: what is launched; None where all of them are the gradient of the output.
        reads: stages whose operands are read, in order.
        reads_x: whether values of the input are needed.
        makes: dtypes of the gradients that are written. One serves all places of the chain between
            which nothing changes it.
        made: for each stage, and the input at the end, which of these is its gradient; -1 for that
            of the output, None for none.
        sums: the stages of biases whose gradients are summed, the last one first.
    """

    tiled: Tiled | None
    reads: tuple[int, ...]
    reads_x: bool
    makes: tuple[torch.dtype, ...]
    made: tuple[int | None, ...]
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
    tiled: Tiled,
    dy: Tensor,
    x: Tensor | None,
    pointers: Sequence[Tensor | None],
    sums: Sequence[Tensor],
    size: tuple[int, int],
) -> None:
    """Fills in the gradients among the pointers, and those of biases."""
    rows, cols = size
    blocks, slices = tiled.covers(dy, rows, cols, _SUM_ROWS if sums else 1)
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
            add_up(parts[i:], pair, (slices,) * len(pair))


def reads_of(stages: Sequence[Stage], first: int = -1) -> tuple[tuple[bool, ...], bool]:
    """Whether backward reads each operand, and the input.

    Args:
        first: the stage to which backward goes; -1 is the input.
    """
    needed = False
    reads = []
    for i in reversed(range(len(stages))):
        kind = stages[i].kind
        needed = needed or (i > first and not stages[i].linear)
        reads.append(kind == DROPOUT or (needed and kind != FUNCTION))
        needed = needed and kind != KEEP
    return tuple(reversed(reads)), needed


def gradients(
    stages: Sequence[Stage],
    wants: Wants,
    cols: int,
    dtype: torch.dtype,
    dtypes: Sequence[torch.dtype],
) -> Gradients:
    """Decides what backward reads and writes.

    Args:
        wants, dtypes: as in ``Chain.backward``.
        dtype: of the gradient of the output.
    """
    itemsize = dtype.itemsize
    n = len(stages)
    first = -1 if wants[n] else min((i for i in range(n) if wants[i]), default=n)
    read, reads_x = reads_of(stages, first)
    reads = tuple(i for i in range(n) if read[i])
    makes: list[torch.dtype] = []
    made: list[int | None] = [None] * (n + 1)
    sums: list[int] = []
    results: dict[int, int] = {}
    current: int | None = -1
    for i in reversed(range(-1, n)):  # at -1, also in lists, stands the input
        kind = ADD if i < 0 else stages[i].kind
        if wants[i] and kind == BIAS:
            results[i] = len(sums)
            sums.append(i)
        elif wants[i]:
            if current is None:
                current = len(makes)
                makes.append(dtype)
                results[i] = len(reads) + current
            made[i] = current
        if kind in (FUNCTION, DROPOUT):
            current = None
            dtype = dtypes[i] if kind == FUNCTION else dtype
    if not makes and not sums:
        return Gradients(None, (), False, (), tuple(made), ())
    # The gradient of the input is written like that of something added before the first stage.
    sources = {i: slot for slot, i in enumerate(reads)}
    before = ADD, -1, results.get(-1, -1), _IDENTITY
    device = before, *_device(stages, sources, results, itemsize)
    busy = reads_x and any(stages[i].kind == DROPOUT for i in reads)
    tiled = _backward(device, len(sums), busy, cols, itemsize)
    return Gradients(tiled, reads, reads_x, tuple(makes), tuple(made), tuple(sums))


def forward_launch(stages: Sequence[Stage], cols: int, itemsize: int) -> Tiled:
    """What runs the stages."""
    return _forward(_device(stages, _sources(stages), {}, itemsize), cols, itemsize)


def forward_norm_launch(
    stages: Sequence[Stage], cols: int, itemsize: int, zero_centered: bool
) -> tuple[Launch, int]:
    """What runs the stages and the norm of their result, and the rows of a program."""
    return _norm(_device(stages, _sources(stages), {}, itemsize), cols, zero_centered)


def _sources(stages: Sequence[Stage]) -> dict[int, int]:
    """For stages that have an operand in forward, which one it is."""
    holders = [i for i, stage in enumerate(stages) if stage.kind != FUNCTION]
    return {i: n for n, i in enumerate(holders)}


def _device(
    stages: Sequence[Stage], sources: dict[int, int], results: dict[int, int], itemsize: int
) -> tuple[tuple[Any, ...], ...]:
    """The stages as device functions take them."""
    out = []
    for i, stage in enumerate(stages):
        parameters: tuple[float, ...] = stage.parameters
        if stage.kind == DROPOUT:
            (p,) = parameters
            parameters = plain.threshold(p), plain.rescale(p), itemsize == 2
        device = stage.device or _IDENTITY
        out.append((stage.kind, sources.get(i, -1), results.get(i, -1), device, *parameters))
    return tuple(out)


@functools.lru_cache(None)
def _forward(stages: tuple[Any, ...], cols: int, itemsize: int) -> Tiled:
    elements = _BYTES // itemsize
    return _tiled("forward", {"STAGES": _loaded(stages)}, cols, elements, _PROGRAMS, 1)


@functools.lru_cache(None)
def _norm(stages: tuple[Any, ...], cols: int, zero_centered: bool) -> tuple[Launch, int]:
    return chain_forward_launch(_loaded(stages), cols, zero_centered)


@functools.lru_cache(None)
def _backward(stages: tuple[Any, ...], biases: int, busy: bool, cols: int, itemsize: int) -> Tiled:
    constants = {"STAGES": _loaded(stages), "BIASES": biases}
    if not biases:
        return _tiled("backward", constants, cols, _BYTES // itemsize, _PROGRAMS, 1)
    programs, ahead = (_BUSY_PROGRAMS, _BUSY_AHEAD) if busy else (_SUM_PROGRAMS, 1)
    cols = min(cols, _SUM_COLS)
    return _tiled("backward", constants, cols, _SUM_BYTES // itemsize, programs, ahead)


def _tiled(
    direction: str, constants: dict[str, Any], cols: int, elements: int, programs: int, ahead: int
) -> Tiled:
    block_cols = max(8, tile(cols, elements)[1])  # random numbers come in fours and eights
    block_rows = elements // block_cols
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "AHEAD": ahead}
    launch = Launch(f"pointwise:chain_{direction}", {**constants, **sizes}, num_warps=_WARPS)
    return Tiled(launch, block_rows, block_cols, programs)


def _loaded(stages: tuple[Any, ...]) -> tuple[Any, ...]:
    """The stages with functions from outside of this package imported."""
    return tuple((*stage[:3], _function(stage[3]), *stage[4:]) for stage in stages)


def _function(device: Any) -> Any:
    if not isinstance(device, str) or device.startswith("@"):
        return device
    module, _, name = device.partition(":")
    return getattr(importlib.import_module(module), name)

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
from .activation import cdiv, tile
from .launch import Launch, multiprocessors
from .pointwise_plain import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Stage, Wants

__all__ = [
    "MAX_OPERANDS",
    "Gradients",
    "Tiled",
    "Wants",
    "forward_launch",
    "gradients",
    "launch_backward",
    "padded",
    "reads_of",
    "size_of",
]

# Operands that the device functions take. Backward has at most one more than forward, for dx.
_POINTERS = 8
MAX_OPERANDS = _POINTERS - 1

# Bytes of x per program: two accesses of 16 bytes by each thread of 4 warps.
_BYTES = 4096
_WARPS = 4

# Shapes that do not matter to a chain are taken as rows of the largest power of two that divides
# the size, from here to _BYTES: aligned, and no lane idle at the end of a row.
_MIN_WIDTH = 128

# With sums over rows 128 columns at a time, and at least 128 rows for each partial sum, so that
# these are below 2% of the traffic.
_SUM_COLS = 128
_SUM_ROWS = 128
_SUM_PROGRAMS = 8

_IDENTITY = "@scalar:identity"


class Tiled(NamedTuple):
    """A launch, and the size of its tiles."""

    launch: Launch
    block_rows: int
    block_cols: int


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
        width = min(size & -size, _BYTES)
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
    launch, block_rows, block_cols = tiled
    rows, cols = size
    blocks, slices = cdiv(cols, block_cols), cdiv(rows, block_rows)
    parts = None
    if sums:
        programs = multiprocessors(dy) * _SUM_PROGRAMS // max(1, blocks)
        slices = max(1, min(cdiv(rows, max(_SUM_ROWS, block_rows)), programs))
        parts = sums[0]
        if slices > 1 or len(sums) > 1:
            shape = len(sums), slices, cols
            parts = torch.empty(shape, dtype=torch.float32, device=dy.device)
    launch((blocks * slices, 1, 1), (dy, x, parts, *padded(pointers)), (rows, cols, slices))
    if parts is not None and parts is not sums[0]:
        total, _, block_cols = _total()
        for part, db in zip(parts, sums):
            total((cdiv(cols, block_cols), 1, 1), (part, db), (slices, cols))


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
    device = (ADD, -1, results.get(-1, -1), _IDENTITY), *_device(stages, sources, results)
    tiled = _backward(device, len(sums), cols, itemsize)
    return Gradients(tiled, reads, reads_x, tuple(makes), tuple(made), tuple(sums))


def forward_launch(stages: Sequence[Stage], cols: int, itemsize: int) -> Tiled:
    """What runs the stages."""
    holders = [i for i, stage in enumerate(stages) if stage.kind != FUNCTION]
    return _forward(_device(stages, {i: n for n, i in enumerate(holders)}, {}), cols, itemsize)


def _device(
    stages: Sequence[Stage], sources: dict[int, int], results: dict[int, int]
) -> tuple[tuple[Any, ...], ...]:
    """The stages as device functions take them."""
    out = []
    for i, stage in enumerate(stages):
        parameters = stage.parameters
        if stage.kind == DROPOUT:
            parameters = plain.threshold(parameters[0]), plain.rescale(parameters[0])
        device = stage.device or _IDENTITY
        out.append((stage.kind, sources.get(i, -1), results.get(i, -1), device, *parameters))
    return tuple(out)


@functools.lru_cache(None)
def _forward(stages: tuple[Any, ...], cols: int, itemsize: int) -> Tiled:
    return _tiled("pointwise:chain_forward", {"STAGES": _loaded(stages)}, cols, itemsize)


@functools.lru_cache(None)
def _backward(stages: tuple[Any, ...], biases: int, cols: int, itemsize: int) -> Tiled:
    constants = {"STAGES": _loaded(stages), "BIASES": biases}
    cols = min(cols, _SUM_COLS) if biases else cols
    return _tiled("pointwise:chain_backward", constants, cols, itemsize)


def _tiled(function: str, constants: dict[str, Any], cols: int, itemsize: int) -> Tiled:
    elements = _BYTES // itemsize
    block_cols = max(4, tile(cols, elements)[1])  # random numbers come in fours
    block_rows = elements // block_cols
    constants = {**constants, "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}
    return Tiled(Launch(function, constants, num_warps=_WARPS), block_rows, block_cols)


@functools.lru_cache(None)
def _total() -> Tiled:
    """Adds up partial sums."""
    rows, cols = 16, 64
    constants = {"BLOCK_ROWS": rows, "BLOCK_COLS": cols}
    return Tiled(Launch("activation:sum_slices", constants, num_warps=_WARPS), rows, cols)


def _loaded(stages: tuple[Any, ...]) -> tuple[Any, ...]:
    """The stages with functions from outside of this package imported."""
    return tuple((*stage[:3], _function(stage[3]), *stage[4:]) for stage in stages)


def _function(device: Any) -> Any:
    if not isinstance(device, str) or device.startswith("@"):
        return device
    module, _, name = device.partition(":")
    return getattr(importlib.import_module(module), name)

"""Gated products of scalar functions, over the two parts of the last dimension.

Dimensions: R rows, F columns of output; ``x (…, 2F)`` packs gates and linear units, ``y (…, F)``,
scales, one per row, ``(…)``. A product is given by what ``Glu.arguments`` holds: names and
parameters of its functions, and the columns per block, 0 for the layout in halves. An empty name
for the function of linear units says that there are none: x is ``(…, F)``, all gates.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .activation import Parameters
from .gated_plain import (
    Glu,
    GluArguments,
    gated_backward_over_x_plain,
    gated_backward_plain,
    gated_forward_plain,
)
from .launch import DTYPES, Launch, runs
from .operators import operator
from .rows import cdiv, empty_rows, rows_of, tile

__all__ = ["Glu", "GluArguments", "gated_backward", "gated_backward_", "gated_forward"]

# Blocks of fewer columns than 16 bytes hold.
_NARROW = (1, 2, 4)

# Bytes of one operand per program: 16 for each thread of 4 warps, as in kernels.activation. Forward
# has two operands to load and backward three, so that more bytes are in flight than in a copy.
_BYTES = 2048
_WARPS = 4


class _Plan(NamedTuple):
    launch: Launch
    block_rows: int
    block_cols: int


@functools.lru_cache(None)
def _plan(
    kernel: str,
    gate: str,
    gate_parameters: Parameters,
    up: str,
    up_parameters: Parameters,
    interleave: int,
    itemsize: int,
    cols: int,
) -> _Plan:
    block_rows, block_cols = tile(cols, _BYTES // itemsize)
    constants = {
        "GATE": f"@scalar:{gate}",
        "GATE_P": gate_parameters,
        "UP": f"@scalar:{up}" if up else None,
        "UP_P": up_parameters,
        "INTERLEAVE": interleave,
        "NARROW": bool(up) and interleave in _NARROW,
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
    }
    launch = Launch(f"gated:{kernel}", constants, num_warps=_WARPS)
    return _Plan(launch, block_rows, block_cols)


def _forward_launch(
    x: Tensor,
    gate: str,
    gate_parameters: Parameters,
    up: str,
    up_parameters: Parameters,
    interleave: int,
    scales: Tensor | None,
) -> Tensor:
    *leading, cols = x.shape
    cols = cols // 2 if up else cols
    y = x.new_empty(*leading, cols)
    rows = math.prod(leading)
    plan = _plan(
        "forward", gate, tuple(gate_parameters), up, tuple(up_parameters), interleave,
        x.element_size(), cols,
    )  # fmt: skip
    x, stride = rows_of(x)
    grid = cdiv(rows, plan.block_rows) * cdiv(cols, plan.block_cols)
    plan.launch((grid, 1, 1), (x, _scales(scales, x), y), (rows, cols, stride))
    return y


def _scales(scales: Tensor | None, x: Tensor) -> Tensor | None:
    """The scales, adjacent, in a dtype that kernels read."""
    if scales is None:
        return None
    return (scales if scales.dtype in DTYPES else scales.to(x.dtype)).contiguous()


def _backward_launch(
    dy: Tensor,
    x: Tensor,
    gate: str,
    gate_parameters: Parameters,
    up: str,
    up_parameters: Parameters,
    interleave: int,
    scales: Tensor | None,
    want_dx: bool,
    want_y: bool,
    want_dscales: bool = True,
) -> list[Tensor]:
    if x.dtype not in DTYPES:
        return gated_backward_plain(
            dy, x, gate, gate_parameters, up, up_parameters, interleave, scales, want_dx, want_y,
            want_dscales,
        )  # fmt: skip
    dx = empty_rows(x) if want_dx else None
    arguments = gate, tuple(gate_parameters), up, tuple(up_parameters), interleave
    return _backward_into(dx, dy, x, arguments, scales, want_y, want_dscales)


def _backward_into(
    dx: Tensor | None,
    dy: Tensor,
    x: Tensor,
    arguments: GluArguments,
    scales: Tensor | None,
    want_y: bool,
    want_dscales: bool,
) -> list[Tensor]:
    """Gradients and y; dx, contiguous, may be x."""
    *leading, cols = dy.shape
    y = x.new_empty(*leading, cols) if want_y else None
    dscales = None
    if want_dscales and scales is not None:
        dscales = x.new_empty(scales.shape, dtype=torch.float32)
    rows = math.prod(leading)
    plan = _plan("backward", *arguments, x.element_size(), cols)
    grid = cdiv(rows, plan.block_rows)
    if dscales is None:
        grid *= cdiv(cols, plan.block_cols)
    x, x_stride = rows_of(x)
    dy, dy_stride = rows_of(dy)
    dx_stride = 0 if dx is None else dx.shape[-1]
    tensors = (dy, x, _scales(scales, x), dx, dscales, y)
    plan.launch((grid, 1, 1), tensors, (rows, cols, dy_stride, x_stride, dx_stride))
    return [t for t in (dx, dscales, y) if t is not None]


def gated_backward_(
    dy: Tensor,
    x: Tensor,
    gate: str,
    gate_parameters: Parameters,
    up: str,
    up_parameters: Parameters,
    interleave: int,
    scales: Tensor | None,
    want_y: bool,
    want_dscales: bool = True,
) -> list[Tensor]:
    """As :func:`gated_backward` with dx, for a caller who owns x and is done with it.

    dx is written over a contiguous x, except where torch.compile traces.
    """
    if torch.compiler.is_compiling() or not x.is_contiguous():
        results: list[Tensor] = gated_backward(
            dy, x, gate, gate_parameters, up, up_parameters, interleave, scales, True, want_y,
            want_dscales,
        )  # fmt: skip
        return results
    arguments = gate, tuple(gate_parameters), up, tuple(up_parameters), interleave
    if runs(dy) and runs(x):
        return _backward_into(x, dy, x, arguments, scales, want_y, want_dscales)
    return gated_backward_over_x_plain(dy, x, arguments, scales, want_y, want_dscales)


_PRODUCT = "str gate, float[] gate_parameters, str up, float[] up_parameters, int interleave"

gated_forward = operator(
    f"gated_forward(Tensor x, {_PRODUCT}, Tensor? scales) -> Tensor",
    launch=_forward_launch,
    plain=gated_forward_plain,
)
gated_backward = operator(
    f"gated_backward(Tensor dy, Tensor x, {_PRODUCT}, Tensor? scales, bool want_dx, bool want_y,"
    " bool want_dscales=True) -> Tensor[]",
    launch=_backward_launch,
    plain=gated_backward_plain,
)

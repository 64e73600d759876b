"""Cross entropy of rows of logits: loss, statistics, gradient.

The loss of a row x with target t, label smoothing ε, z-loss ζ and V classes is
``lse - (1 - ε) x[t] - ε / V Σ x + ζ lse²`` with ``lse = log Σ exp(x)``, and its gradient
``(1 + 2 ζ lse) softmax(x) - (1 - ε) [i = t] - ε / V``; both are 0 for rows to ignore. The
statistics of a row are its largest entry m and ``Σ exp(x - m)``, from which those of ranks that
hold parts of the classes can be merged.

ATen's kernels, log_softmax and nll_loss with their backwards, want an fp32 copy of logits in
halves, and move 26 bytes per logit in all; these move 2 forward and 4 backward, and where the
gradient takes the place of the logits 6 for both.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from . import cross_entropy_plain as plain
from .launch import Launch, multiprocessors, runs
from .operators import operator
from .rows import cdiv

__all__ = [
    "cross_entropy_backward",
    "cross_entropy_forward",
    "cross_entropy_gradient",
    "cross_entropy_mean",
    "scaled",
]


class _Tile(NamedTuple):
    """How a program walks along a row: bytes at a time, of which a thread accesses 16 at once."""

    bytes: int
    warps: int


# Measured on an H200, for rows of 8192, 50257 and 128256 halves, as share of a copy: 0.90 to 0.99
# forward and 0.92 to 0.94 backward. With 16 warps and four times the bytes it is 0.56 to 0.94.
_FORWARD = _BACKWARD = _Tile(4096, 4)
# 4 such programs on a multiprocessor: 528 rows of 128256 halves are more than the L2 cache holds,
# and yet they are no slower than 132, as each is at another place of its row. Three tiles are
# fetched ahead: 0.93 of a copy that reads twice, 0.80 without.
_GRADIENT = _Tile(8192, 8)
_GRADIENT_WARPS = 32  # on a multiprocessor
_AHEAD = 3


@functools.lru_cache
def _launch(
    function: str, tile: _Tile, cols: int, vec: int, itemsize: int, smooth: bool, even: bool
) -> Launch:
    """Tiles are no longer than the row needs, and give each thread one access at least."""
    entries = min(tile.bytes // itemsize, max(32 * vec, 1 << (cols - 1).bit_length()))
    constants = {"SMOOTH": smooth, "EVEN": even, "TILE": entries, "VEC": vec}
    if function == "gradient_kernel":
        constants["AHEAD"] = _AHEAD
    return Launch(
        f"cross_entropy:{function}",
        constants,
        num_warps=max(1, min(tile.warps, entries * itemsize // 512)),
    )


def _row_stride(x: Tensor) -> int:
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"Logits must be contiguous along a row. Received strides {x.stride()}.")
    return x.stride(0)


def _even(cols: int, vec: int, *strides: int) -> bool:
    """Whether every row consists of whole vectors."""
    return not any(n % vec for n in (cols, *strides))


def _forward_launch(
    x: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    stride, vec = _row_stride(x), 16 // x.itemsize
    loss = torch.empty(rows, dtype=torch.float32, device=x.device)
    row_max, sum_exp = torch.empty_like(loss), torch.empty_like(loss)
    even = _even(cols, vec, stride)
    launch = _launch("forward_kernel", _FORWARD, cols, vec, x.itemsize, label_smoothing != 0, even)
    launch(
        (rows, 1, 1),
        (x, targets.contiguous(), loss, row_max, sum_exp),
        (stride, cols, ignore_index),
        (label_smoothing, z_loss),
    )
    return loss, row_max, sum_exp


def _backward_launch(
    x: Tensor,
    targets: Tensor,
    row_max: Tensor,
    sum_exp: Tensor,
    dloss: Tensor,
    count: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    rows, cols = x.shape
    stride, vec = _row_stride(x), 16 // x.itemsize
    if (stride - cols) % vec:
        vec = 1  # rows of the two matrices lie differently between 16-byte boundaries
    dx = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    even = _even(cols, vec, stride)
    launch = _launch(
        "backward_kernel", _BACKWARD, cols, vec, x.itemsize, label_smoothing != 0, even
    )
    tiles = cdiv(cols, launch.constants["TILE"])
    launch(
        (rows * tiles, 1, 1),
        (x, targets.contiguous(), row_max, sum_exp, dloss, count, dx),
        (stride, cols, dloss.stride(0) if dloss.dim() else 0, cols, tiles, ignore_index),
        (label_smoothing, z_loss),
    )
    return dx


def _gradient_launch(
    x: Tensor,
    targets: Tensor,
    count: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    rows, cols = x.shape
    stride, vec = _row_stride(x), 16 // x.itemsize
    loss = torch.empty(rows, dtype=torch.float32, device=x.device)
    launch = _launch(
        "gradient_kernel",
        _GRADIENT,
        cols,
        vec,
        x.itemsize,
        label_smoothing != 0,
        _even(cols, vec, stride),
    )
    programs = multiprocessors(x) * (_GRADIENT_WARPS // launch.num_warps)
    launch(
        (min(rows, programs), 1, 1),
        (x, targets.contiguous(), count, loss, x),
        (stride, rows, cols, ignore_index),
        (label_smoothing, z_loss),
    )
    return loss


def _mean_launch(loss: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    mean = torch.empty((), dtype=torch.float32, device=loss.device)
    count = torch.empty((), dtype=torch.int64, device=loss.device)
    _MEAN(
        (1, 1, 1),
        (loss, targets.contiguous(), mean, count),
        (loss.shape[0], ignore_index),
    )
    return mean, count


_MEAN = Launch("cross_entropy:mean_kernel", {"BLOCK": 4096}, num_warps=16)


_ROW = "int ignore_index, float label_smoothing, float z_loss"

cross_entropy_forward = operator(
    f"cross_entropy_forward(Tensor x, Tensor targets, {_ROW}) -> (Tensor, Tensor, Tensor)",
    launch=_forward_launch,
    plain=plain.forward,
)
cross_entropy_backward = operator(
    "cross_entropy_backward(Tensor x, Tensor targets, Tensor row_max, Tensor sum_exp, "
    f"Tensor dloss, Tensor? count, {_ROW}) -> Tensor",
    launch=_backward_launch,
    plain=plain.backward,
)
cross_entropy_mean = operator(
    "cross_entropy_mean(Tensor loss, Tensor targets, int ignore_index) -> (Tensor, Tensor)",
    launch=_mean_launch,
    plain=plain.mean,
)


def cross_entropy_gradient(
    x: Tensor,
    targets: Tensor,
    count: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Losses (rows,), and their gradient for 1, or 1 / count, written over the logits.

    Args:
        x: logits (rows, classes), the caller's own: while torch.compile traces, the gradient is a
            tensor of its own.
    """
    if torch.compiler.is_compiling():
        row = ignore_index, label_smoothing, z_loss
        loss, row_max, sum_exp = cross_entropy_forward(x, targets, *row)
        one = loss.new_ones(())
        return loss, cross_entropy_backward(x, targets, row_max, sum_exp, one, count, *row)
    if runs(x):
        return _gradient_launch(x, targets, count, ignore_index, label_smoothing, z_loss), x
    return plain.gradient(x, targets, count, ignore_index, label_smoothing, z_loss), x


_SCALE_BLOCK = 4096


@functools.lru_cache
def _scale_launch(in_place: bool) -> Launch:
    constants = {"IN_PLACE": in_place, "BLOCK": _SCALE_BLOCK}
    return Launch("cross_entropy:scale_kernel", constants, num_warps=8)


def scaled(
    x: Tensor, factor: Tensor, count: Tensor | None, dtype: torch.dtype, *, in_place: bool
) -> Tensor:
    """``x factor / count`` in ``dtype``; nothing is moved for 1 if ``x`` may be returned.

    Args:
        x: contiguous.
        factor, count: (), on the device of x. Nothing waits for a GPU.
        in_place: whether ``x`` may be written to and returned.
    """
    in_place = in_place and x.dtype == dtype and not torch.compiler.is_compiling()
    if runs(x) and not torch.compiler.is_compiling():
        y = x if in_place else torch.empty_like(x, dtype=dtype)
        programs = min(cdiv(x.numel(), _SCALE_BLOCK), 8 * multiprocessors(x))
        _scale_launch(in_place)((programs, 1, 1), (x, y, factor, count), (x.numel(),))
        return y
    if count is not None:
        factor = factor / count.clamp_min(1)  # where no row counts, x is 0
    if x.is_cpu and not torch.compiler.is_compiling():
        number = factor.item()
        if in_place:
            return x if number == 1 else x.mul_(number)
        return torch.mul(x, number).to(dtype)
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * factor).to(dtype)

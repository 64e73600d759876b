"""Cross entropy of rows of logits: loss, statistics, gradient.

The loss of a row x with target t, label smoothing ε, z-loss ζ and V classes is
``lse - (1 - ε) x[t] - ε / V Σ x + ζ lse²`` with ``lse = log Σ exp(x)``, and its gradient
``(1 + 2 ζ lse) softmax(x) - (1 - ε) [i = t] - ε / V``; both are 0 for rows to ignore. The
statistics of a row are its largest entry m and ``Σ exp(x - m)``, from which those of ranks that
hold parts of the classes can be merged.

ATen's kernels, log_softmax and nll_loss with their backwards, want an fp32 copy of fp16 or bf16
logits, and move 26 bytes per logit in all; these move 2 forward and 4 backward, and where the
gradient takes the place of the logits 6 for both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cross_entropy_plain as plain
from . import cross_entropy_traced as traced
from .choice import kernel_or_plain
from .cross_entropy_plain import LossGradient, MeanLoss, RowLosses, Terms
from .launch import DTYPES, Launch, multiprocessors, runs
from .tiling import cdiv


@dataclass(frozen=True)
class RowRule:
    """How a program goes along a row.

    Attributes:
        tile_bytes: logits at a time, of which a thread accesses 16 bytes at once.
        warps: of a program, at most.
        resident_warps: of all programs on a multiprocessor, where a program takes several rows.
        ahead: how many tiles are under way; 1 fetches none before it is needed.
    """

    tile_bytes: int
    warps: int
    resident_warps: int | None = None
    ahead: int | None = None


# Measured on an H200, for rows of 8192, 50257 and 128256 bf16 logits, as share of a copy: 0.90 to
# 0.99 forward and 0.92 to 0.94 backward. With 16 warps and four times the bytes it is 0.56 to 0.94.
FORWARD = BACKWARD = RowRule(tile_bytes=4096, warps=4)
_GRADIENT = RowRule(
    tile_bytes=8192,
    warps=8,
    # 4 programs on a multiprocessor: 528 rows of 128256 bf16 logits are more than the L2 cache
    # holds, and yet they are no slower than 132, as each is at another place of its row.
    resident_warps=32,
    ahead=3,  # 0.93 of a copy that reads twice, 0.80 with 1
)


@functools.lru_cache
def row_launch(
    function: str, rule: RowRule, cols: int, vec: int, itemsize: int, smooth: bool, even: bool
) -> Launch:
    """Tiles are no longer than the row needs, and give each thread one access at least."""
    entries = min(rule.tile_bytes // itemsize, max(32 * vec, 1 << (cols - 1).bit_length()))
    constants = {"SMOOTH": smooth, "EVEN": even, "TILE": entries, "VEC": vec}
    if rule.ahead is not None:
        constants["AHEAD"] = rule.ahead
    num_warps = max(1, min(rule.warps, entries * itemsize // 512))
    return Launch(f"cross_entropy:{function}", constants, num_warps=num_warps)


def contiguous_rows(x: Tensor) -> Tensor:
    """``x``, or a copy whose rows are contiguous."""
    return x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()


def even_rows(cols: int, vec: int, *strides: int) -> bool:
    """Whether every row consists of whole vectors."""
    return not any(n % vec for n in (cols, *strides))


def _launch_forward(x: Tensor, targets: Tensor, terms: Terms) -> RowLosses:
    rows, cols = x.shape
    x = contiguous_rows(x)
    stride, vec = x.stride(0), 16 // x.itemsize
    loss = torch.empty(rows, dtype=torch.float32, device=x.device)
    row_max, sum_exp = torch.empty_like(loss), torch.empty_like(loss)
    even = even_rows(cols, vec, stride)
    ignore_index, smoothing, z_loss = terms
    launch = row_launch("forward_kernel", FORWARD, cols, vec, x.itemsize, smoothing != 0, even)
    launch(
        (rows, 1, 1),
        (x, targets.contiguous(), loss, row_max, sum_exp),
        (stride, cols, ignore_index),
        (smoothing, z_loss),
    )
    return RowLosses(loss, row_max, sum_exp)


def launch_backward(
    x: Tensor,
    targets: Tensor,
    row_max: Tensor,
    sum_exp: Tensor,
    dloss: Tensor,
    count: Tensor | None,
    terms: Terms,
    classes: int = 0,
    in_place: bool = False,
) -> Tensor:
    """Arguments as of the twin in plain torch; ``classes`` are those of all ranks, 0: the columns.

    With ``in_place`` the gradient takes the place of the logits.
    """
    rows, cols = x.shape
    x = contiguous_rows(x)
    dx = x if in_place else torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    stride, dx_stride, vec = x.stride(0), dx.stride(0), 16 // x.itemsize
    if (stride - dx_stride) % vec:
        vec = 1  # rows of the two matrices lie differently between 16-byte boundaries
    even = even_rows(cols, vec, stride)
    ignore_index, smoothing, z_loss = terms
    launch = row_launch("backward_kernel", BACKWARD, cols, vec, x.itemsize, smoothing != 0, even)
    tiles = cdiv(cols, launch.constants["TILE"])
    step = dloss.stride(0) if dloss.dim() else 0
    launch(
        (rows * tiles, 1, 1),
        (x, targets.contiguous(), row_max, sum_exp, dloss, count, dx),
        (stride, dx_stride, step, cols, tiles, ignore_index),
        (smoothing, smoothing / (classes or cols), z_loss),
    )
    return dx


def _launch_gradient(
    x: Tensor, targets: Tensor, count: Tensor | None, terms: Terms
) -> LossGradient:
    rows, cols = x.shape
    if cols > 1 and x.stride(1) != 1:
        raise ValueError(f"Logits must be contiguous along a row. Received strides {x.stride()}.")
    stride, vec = x.stride(0), 16 // x.itemsize
    loss = torch.empty(rows, dtype=torch.float32, device=x.device)
    even = even_rows(cols, vec, stride)
    ignore_index, smoothing, z_loss = terms
    launch = row_launch("gradient_kernel", _GRADIENT, cols, vec, x.itemsize, smoothing != 0, even)
    assert _GRADIENT.resident_warps is not None
    programs = multiprocessors(x) * (_GRADIENT.resident_warps // launch.num_warps)
    launch(
        (min(rows, programs), 1, 1),
        (x, targets.contiguous(), count, loss, x),
        (stride, rows, cols, ignore_index),
        (smoothing, z_loss),
    )
    return LossGradient(loss, x)


def _launch_mean(loss: Tensor, targets: Tensor, ignore_index: int) -> MeanLoss:
    mean = torch.empty((), dtype=torch.float32, device=loss.device)
    count = torch.empty((), dtype=torch.int64, device=loss.device)
    tensors = (loss, targets.contiguous(), mean, count)
    _MEAN((1, 1, 1), tensors, (loss.shape[0], ignore_index))
    return MeanLoss(mean, count)


_MEAN = Launch("cross_entropy:mean_kernel", {"BLOCK": 4096}, num_warps=16)

cross_entropy_forward = kernel_or_plain(
    launch=_launch_forward, plain=plain.forward, traced=traced.forward
)
cross_entropy_backward = kernel_or_plain(
    launch=launch_backward, plain=plain.backward, traced=traced.backward
)
cross_entropy_mean = kernel_or_plain(launch=_launch_mean, plain=plain.mean)
cross_entropy_gradient = kernel_or_plain(
    launch=_launch_gradient, plain=plain.gradient, traced=traced.gradient
)


def by_aten(x: Tensor, terms: Terms) -> bool:
    """Whether :func:`aten_loss` computes the loss and its mean in one call: few logits on a CPU."""
    return not runs(x, DTYPES) and not torch.compiler.is_compiling() and plain.by_aten(x, terms)


@dataclass(frozen=True)
class _ScaleRule:
    """Elements of a program at a time, its warps, and programs per multiprocessor."""

    block: int
    warps: int
    programs: int


_SCALE = _ScaleRule(block=4096, warps=8, programs=8)


@functools.lru_cache
def _scale_kernel(in_place: bool) -> Launch:
    constants = {"IN_PLACE": in_place, "BLOCK": _SCALE.block}
    return Launch("cross_entropy:scale_kernel", constants, num_warps=_SCALE.warps)


def _launch_scale(
    x: Tensor, factor: Tensor, count: Tensor | None, dtype: torch.dtype, in_place: bool
) -> Tensor:
    y = x if in_place else torch.empty_like(x, dtype=dtype)
    programs = min(cdiv(x.numel(), _SCALE.block), _SCALE.programs * multiprocessors(x))
    _scale_kernel(in_place)((programs, 1, 1), (x, y, factor, count), (x.numel(),))
    return y


_scaled = kernel_or_plain(launch=_launch_scale, plain=plain.scaled, traced=traced.scaled)


def scaled(
    x: Tensor, factor: Tensor, count: Tensor | None, dtype: torch.dtype, *, in_place: bool
) -> Tensor:
    """``x factor / count`` in ``dtype``; nothing is moved for 1 if ``x`` may be returned.

    Args:
        x: contiguous.
        factor, count: (), on the device of x. Nothing waits for a GPU.
        in_place: whether ``x`` may be written to and returned.
    """
    return _scaled(x, factor, count, dtype, in_place and x.dtype == dtype)

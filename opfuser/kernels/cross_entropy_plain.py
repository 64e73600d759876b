"""Cross entropy in plain torch: the path of a CPU, and the twin of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.recording import seen_whole
from .scalar import cast, wide_dtype

_aten = torch.ops.aten

# Logits worked on at a time: on a CPU per thread, a quarter of its L2 cache in fp32; on a GPU
# 256 MiB.
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 26}


_WHOLE = slice(None)


def blocks_of_rows(x: Tensor) -> list[slice]:
    """Blocks of rows whose fp32 copy is small; one if there are no rows."""
    rows, cols = x.shape
    limit = _BLOCK.get(x.device.type)
    size = rows if limit is None else max(1, limit // max(1, cols))
    if x.is_cpu:
        size *= torch.get_num_threads()  # which share the rows of a softmax
    if rows <= size:
        return [_WHOLE]
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def _cut(block: slice, *tensors: Tensor) -> Sequence[Tensor]:
    """The rows of a block, and all as they are: slices take a microsecond each."""
    return tensors if block is _WHOLE else [t[block] for t in tensors]


def classes_of_rows(targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which rows count, and a class for every row (0 for those that do not), each (rows, 1)."""
    targets = targets.unsqueeze(1)
    valid = targets != ignore_index
    return valid, cast(torch.where(valid, targets, 0), torch.int64)


def scaled_rows(
    targets: Tensor, dloss: Tensor, count: Tensor | None, terms: Terms
) -> tuple[Tensor, Tensor]:
    """A class for every row, and what its gradient is multiplied by, each (rows, 1)."""
    valid, index = classes_of_rows(targets, terms.ignore_index)
    scale = dloss if count is None else dloss / count
    return index, torch.where(valid, scale.unsqueeze(1) if scale.dim() else scale, 0.0)


class Terms(NamedTuple):
    """What the loss of a row consists of.

    Attributes:
        ignore_index: the target of rows that do not count.
        label_smoothing: ε.
        z_loss: ζ.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float


class RowLosses(NamedTuple):
    """Per row (rows,), in fp32 or wider: the loss, the largest logit m and ``Σ exp(x - m)``."""

    loss: Tensor
    row_max: Tensor
    sum_exp: Tensor


class MeanLoss(NamedTuple):
    """Mean () of the losses of rows that count, nan without any; and their number () of int64."""

    mean: Tensor
    num_valid: Tensor


class LossGradient(NamedTuple):
    """Losses (rows,), and the gradient of the logits."""

    loss: Tensor
    dx: Tensor


class _Rows(NamedTuple):
    """Rows of logits and their softmax; the largest logit and ``Σ exp(x - m)``, each (rows, 1)."""

    softmax: Tensor
    row_max: Tensor
    sum_exp: Tensor


def _rows(x: Tensor) -> _Rows:
    x = cast(x, wide_dtype(x.dtype))
    row_max = x.amax(1, keepdim=True)
    # ATen's takes 84 us for 4 rows of 32000 in fp32 in one thread of a CPU; exp_ alone takes 142.
    if x.is_cpu:
        p = torch.softmax(x, 1)
        return _Rows(p, row_max, p.amax(1, keepdim=True).reciprocal_())
    # Differences to the maximum, not to the log-sum-exp: the rounding of that one would be a
    # relative error of every probability.
    exp = (x - row_max).exp_()
    sum_exp = exp.sum(1, keepdim=True)
    return _Rows(exp.div_(sum_exp), row_max, sum_exp)


def _softmax_rows(x: Tensor, row_max: Tensor, sum_exp: Tensor) -> _Rows:
    """The same where the statistics are known."""
    by_aten = x.is_cpu
    p = torch.softmax(x, 1, dtype=row_max.dtype) if by_aten else (x - row_max).exp_().div_(sum_exp)
    return _Rows(p, row_max, sum_exp)


def losses_of_rows(
    x: Tensor, row_max: Tensor, sum_exp: Tensor, index: Tensor, terms: Terms
) -> Tensor:
    """The losses, (rows, 1), given the statistics and the class of each row."""
    _, smoothing, z_loss = terms
    log_sum = sum_exp.log()
    loss = row_max - x.gather(1, index)
    if smoothing:
        mean = x.mean(1, keepdim=True, dtype=row_max.dtype)
        loss = torch.lerp(loss, row_max - mean, smoothing)
    loss += log_sum
    if z_loss:
        loss += z_loss * log_sum.add_(row_max).square_()
    return loss


def _losses(x: Tensor, rows: _Rows, index: Tensor, terms: Terms) -> Tensor:
    return losses_of_rows(x, rows.row_max, rows.sum_exp, index, terms)


def _gradient(
    rows: _Rows, index: Tensor, scale: Tensor, terms: Terms, out: Tensor | None
) -> Tensor:
    """The gradient of logits, written to ``out``, or over their softmax."""
    _, smoothing, z_loss = terms
    dx, row_max, sum_exp = rows
    p_scale = scale
    if z_loss:
        p_scale = scale * (1 + 2 * z_loss * (row_max + sum_exp.log()))
    dx = torch.mul(dx, p_scale, out=dx if out is None else out)
    if smoothing:
        dx.sub_(smoothing / dx.shape[1] * scale)
    return dx.scatter_add_(1, index, (smoothing - 1) * scale)


def by_aten(x: Tensor, terms: Terms) -> bool:
    """Whether ATen's loss is the one to take: on a CPU, for one block, without further terms."""
    few = x.is_cpu and x.shape[0] > 0 and not (terms.label_smoothing or terms.z_loss)
    return few and blocks_of_rows(x) == [_WHOLE]


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def aten_loss(
    x: Tensor, targets: Tensor, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor]:
    """The loss of logits (rows, classes), and what a mean divided by, () of fp32 or wider."""
    log_p = torch.log_softmax(cast(x, wide_dtype(x.dtype)), 1)
    targets, reduced = cast(targets, torch.int64), _REDUCTIONS[reduction]
    loss, divisor = _aten.nll_loss_forward(log_p, targets, None, reduced, ignore_index)
    return loss, divisor


def aten_gradient(
    x: Tensor, targets: Tensor, dloss: Tensor, divisor: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """Gradient of the logits, given that of :func:`aten_loss`."""
    log_p = torch.log_softmax(cast(x, wide_dtype(x.dtype)), 1)
    targets, reduced = cast(targets, torch.int64), _REDUCTIONS[reduction]
    d_log_p = _aten.nll_loss_backward(dloss, log_p, targets, None, reduced, ignore_index, divisor)
    return cast(_aten._log_softmax_backward_data(d_log_p, log_p, 1, log_p.dtype), x.dtype)


def _gradient_by_aten(
    x: Tensor, targets: Tensor, count: Tensor | None, ignore_index: int
) -> LossGradient:
    """As :func:`gradient`, without further terms, in seven calls of ATen in place of seventeen."""
    log_p = torch.log_softmax(cast(x, wide_dtype(x.dtype)), 1)
    targets = cast(targets, torch.int64)
    losses, weight = _aten.nll_loss_forward(log_p, targets, None, 0, ignore_index)
    scale = (
        log_p.new_ones(()) if count is None else count.clamp_min(1).to(log_p.dtype).reciprocal_()
    )
    d_log_p = _aten.nll_loss_backward(
        scale.expand(len(x)), log_p, targets, None, 0, ignore_index, weight
    )
    backward = _aten._log_softmax_backward_data
    if x.dtype == log_p.dtype:
        backward.out(d_log_p, log_p, 1, log_p.dtype, out=x)
    else:
        x.copy_(backward(d_log_p, log_p, 1, log_p.dtype))
    return LossGradient(losses, x)


def forward(x: Tensor, targets: Tensor, terms: Terms) -> RowLosses:
    """Losses and statistics of logits (rows, classes)."""
    if by_aten(x, terms):
        x = cast(x, wide_dtype(x.dtype))
        loss, _ = aten_loss(x, targets, terms.ignore_index, "none")
        return RowLosses(loss, x.amax(1), torch.softmax(x, 1).amax(1).reciprocal_())
    valid, index = classes_of_rows(targets, terms.ignore_index)
    parts = []
    for block in blocks_of_rows(x):
        part, own = _cut(block, x, index)
        rows = _rows(part)
        parts.append((_losses(part, rows, own, terms), rows.row_max, rows.sum_exp))
    loss, row_max, sum_exp = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts))
    loss = torch.where(valid, loss, 0.0)
    return RowLosses(loss.squeeze(1), row_max.squeeze(1), sum_exp.squeeze(1))


def backward(
    x: Tensor,
    targets: Tensor,
    row_max: Tensor,
    sum_exp: Tensor,
    dloss: Tensor,
    count: Tensor | None,
    terms: Terms,
) -> Tensor:
    """Gradient of the logits, contiguous.

    Args:
        dloss: gradient of the losses (rows,), or one for all of them ().
        count: what divides it, () of int64.
    """
    index, scale = scaled_rows(targets, dloss, count, terms)
    row_max, sum_exp = row_max.unsqueeze(1), sum_exp.unsqueeze(1)
    blocks = blocks_of_rows(x)
    if len(blocks) == 1:
        rows = _softmax_rows(x, row_max, sum_exp)
        return cast(_gradient(rows, index, scale, terms, None), x.dtype).contiguous()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    for block in blocks:
        rows = _softmax_rows(x[block], row_max[block], sum_exp[block])
        _write(dx[block], rows, index[block], scale[block], terms)
    return dx


def _write(out: Tensor, rows: _Rows, index: Tensor, scale: Tensor, terms: Terms) -> None:
    """The gradient to ``out``; in the dtype of the arithmetic until it is complete."""
    if out.dtype == scale.dtype:
        _gradient(rows, index, scale, terms, out)
    else:
        out.copy_(_gradient(rows, index, scale, terms, None))


def gradient(x: Tensor, targets: Tensor, count: Tensor | None, terms: Terms) -> LossGradient:
    """Losses, and their gradient for 1, or 1 / count, written over the logits.

    Args:
        x: logits (rows, classes), the caller's own.
        count: () of int64.
    """
    if by_aten(x, terms):
        return _gradient_by_aten(x, targets, count, terms.ignore_index)
    valid, index = classes_of_rows(targets, terms.ignore_index)
    scale = valid.to(wide_dtype(x.dtype))
    if count is not None:
        scale /= count.clamp_min(1)
    losses = []
    for block in blocks_of_rows(x):
        part, own, factor = _cut(block, x, index, scale)
        rows = _rows(part)
        losses.append(_losses(part, rows, own, terms))
        _write(part, rows, own, factor, terms)
    loss = losses[0] if len(losses) == 1 else torch.cat(losses)
    return LossGradient(torch.where(valid, loss, 0.0).squeeze(1), x)


def mean(loss: Tensor, targets: Tensor, ignore_index: int) -> MeanLoss:
    """Mean of the losses."""
    count = (targets != ignore_index).sum()
    return MeanLoss(loss.sum() / count, count)


@seen_whole(writes=0, flag=4)
def scaled(
    x: Tensor, factor: Tensor, count: Tensor | None, dtype: torch.dtype, in_place: bool
) -> Tensor:
    """``x factor / count`` in ``dtype``, which is that of x if it may be written to."""
    if count is not None:
        factor = factor / count.clamp_min(1)  # where no row counts, x is 0
    if x.is_cpu:
        number = factor.item()
        if in_place:
            return x if number == 1 else x.mul_(number)
        return torch.mul(x, number).to(dtype)
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * factor).to(dtype)

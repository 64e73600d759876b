"""Cross entropy of rows of logits whose classes are divided among ranks.

With label smoothing ε, z-loss ζ and V classes over all ranks, loss and gradient of a row are those
of ``cross_entropy``. Of its part of a row a rank r computes the largest logit ``m_r``,
``s_r = Σ exp(x - m_r)``, the logit of the target if that is a class of its own, and ``Σ x``. From
those of all ranks follow

    m = max m_r,  Σ exp(x - m) = Σ_r s_r exp(m_r - m)

and the loss. The gradient of the rank's logits is a function of these and of its logits alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .choice import kernel_or_plain
from .cross_entropy import FORWARD, contiguous_rows, even_rows, launch_backward, row_launch
from .cross_entropy_plain import RowLosses, Terms, blocks_of_rows
from .scalar import cast, wide_dtype

# What a rank tells of a row: largest logit, sum of exponentials, logit of the target, sum.
_STATISTICS = 4


class Classes(NamedTuple):
    """Which classes the columns of the logits are.

    Attributes:
        start: the first one.
        total: how many all ranks have together.
    """

    start: int
    total: int


def _launch_statistics(x: Tensor, targets: Tensor, terms: Terms, classes: Classes) -> Tensor:
    rows, cols = x.shape
    x = contiguous_rows(x)
    stride, vec = x.stride(0), 16 // x.itemsize
    out = torch.empty((rows, _STATISTICS), dtype=torch.float32, device=x.device)
    smooth, even = terms.label_smoothing != 0, even_rows(cols, vec, stride)
    launch = row_launch("statistics_kernel", FORWARD, cols, vec, x.itemsize, smooth, even)
    ints = stride, cols, classes.start, terms.ignore_index
    launch((rows, 1, 1), (x, targets.contiguous(), out), ints)
    return out


def _launch_gradient(
    x: Tensor,
    targets: Tensor,
    row: RowLosses,
    dloss: Tensor,
    count: Tensor | None,
    terms: Terms,
    classes: Classes,
    in_place: bool,
) -> Tensor:
    # A target of another rank is none of the columns that it is compared with.
    targets = targets - classes.start
    terms = terms._replace(ignore_index=terms.ignore_index - classes.start)
    given = row.row_max, row.sum_exp, dloss, count, terms, classes.total, in_place
    return launch_backward(x, targets, *given)


class _Targets(NamedTuple):
    """Per row, (rows, 1): whether it counts, whether its target is here, and which column."""

    counts: Tensor
    here: Tensor
    column: Tensor


def _targets(targets: Tensor, terms: Terms, classes: Classes, cols: int) -> _Targets:
    targets = targets.unsqueeze(1)
    counts = targets != terms.ignore_index
    column = targets - classes.start
    here = counts & (column >= 0) & (column < cols)
    return _Targets(counts, here, cast(torch.where(here, column, 0), torch.int64))


def _plain_statistics(x: Tensor, targets: Tensor, terms: Terms, classes: Classes) -> Tensor:
    """What :func:`merged_losses` needs of a rank's logits, (rows, 4), in fp32 or wider.

    Args:
        x: logits (rows, classes of this rank), at least one of them.
        targets: (rows,), of all classes.
        classes: which the columns are.
    """
    _, here, column = _targets(targets, terms, classes, x.shape[1])
    return torch.cat([_of_rows(x[b], here[b], column[b], terms) for b in blocks_of_rows(x)])


def _traced_statistics(x: Tensor, targets: Tensor, terms: Terms, classes: Classes) -> Tensor:
    _, here, column = _targets(targets, terms, classes, x.shape[1])
    return _of_rows(x, here, column, terms)


def _of_rows(x: Tensor, here: Tensor, column: Tensor, terms: Terms) -> Tensor:
    """The statistics of a block of rows."""
    wide = wide_dtype(x.dtype)
    rows = cast(x, wide)
    # Not -inf, where all logits are: differences to it would be nan.
    m = rows.amax(1, keepdim=True).clamp_min_(torch.finfo(wide).min)
    entry = torch.where(here, rows.gather(1, column), 0.0)
    total = rows.sum(1, keepdim=True) if terms.label_smoothing else torch.zeros_like(m)
    return torch.cat([m, (rows - m).exp_().sum(1, keepdim=True), entry, total], 1)


def _plain_gradient(
    x: Tensor,
    targets: Tensor,
    row: RowLosses,
    dloss: Tensor,
    count: Tensor | None,
    terms: Terms,
    classes: Classes,
    in_place: bool,
) -> Tensor:
    """Gradient of a rank's logits.

    Args:
        x, targets, terms, classes: see :func:`_plain_statistics`.
        row: of :func:`merged_losses`.
        dloss: gradient of the losses (rows,), or one for all of them ().
        count: what divides it, () of int64; 0 counts as 1.
        in_place: whether it takes the place of the logits. While torch.compile traces it does not.
    """
    smoothing = terms.label_smoothing
    m, scale, p_scale, at_target, column = _factors(x, targets, row, dloss, count, terms, classes)
    dx = x if in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
    for block in blocks_of_rows(x):
        part = (x[block] - m[block]).exp_().mul_(p_scale[block])
        if smoothing:
            part.sub_(smoothing / classes.total * scale[block])
        dx[block] = part.scatter_add_(1, column[block], at_target[block])
    return dx


def _traced_gradient(
    x: Tensor,
    targets: Tensor,
    row: RowLosses,
    dloss: Tensor,
    count: Tensor | None,
    terms: Terms,
    classes: Classes,
    in_place: bool,
) -> Tensor:
    m, scale, p_scale, at_target, column = _factors(x, targets, row, dloss, count, terms, classes)
    hit = torch.arange(x.shape[1], device=x.device) == column
    even = terms.label_smoothing / classes.total * scale
    return cast((x - m).exp() * p_scale - even + hit * at_target, x.dtype)


class _Factors(NamedTuple):
    """Factors per row, (rows, 1): the gradient is ``exp(x - m) p_scale - ε scale / classes``.

    At the column of the target, ``at_target`` is added to it.
    """

    m: Tensor
    scale: Tensor
    p_scale: Tensor
    at_target: Tensor
    column: Tensor


def _factors(
    x: Tensor,
    targets: Tensor,
    row: RowLosses,
    dloss: Tensor,
    count: Tensor | None,
    terms: Terms,
    classes: Classes,
) -> _Factors:
    _, smoothing, z_loss = terms
    counts, here, column = _targets(targets, terms, classes, x.shape[1])
    scale = dloss if count is None else dloss / count.clamp_min(1)
    scale = torch.where(counts, scale.unsqueeze(1) if scale.dim() else scale, 0.0)
    m, s = row.row_max.unsqueeze(1), row.sum_exp.unsqueeze(1)
    p_scale = scale / s
    if z_loss:
        p_scale = p_scale * (1 + 2 * z_loss * (m + s.log()))
    at_target = torch.where(here, (smoothing - 1) * scale, 0.0)
    return _Factors(m, scale, p_scale, at_target, column)


slice_statistics = kernel_or_plain(
    launch=_launch_statistics, plain=_plain_statistics, traced=_traced_statistics
)
slice_gradient = kernel_or_plain(
    launch=_launch_gradient, plain=_plain_gradient, traced=_traced_gradient
)


def merged_losses(parts: Tensor, targets: Tensor, terms: Terms, classes: int) -> RowLosses:
    """Losses of rows, and the largest logit and the sum of exponentials over all classes.

    A target that is neither a class nor to be ignored makes loss and gradient of its row nan.

    Args:
        parts: the statistics of all ranks, (ranks, rows, 4).
        classes: of all ranks together.
    """
    ignore_index, smoothing, z_loss = terms
    row_max, sum_exp, entry, total = parts.unbind(-1)
    m = row_max.amax(0)
    s = (sum_exp * (row_max - m).exp()).sum(0)
    ignored = targets == ignore_index
    s = torch.where(ignored | ((targets >= 0) & (targets < classes)), s, torch.nan)
    log_sum = s.log()
    loss = m - entry.sum(0)
    if smoothing:
        loss = torch.lerp(loss, m - total.sum(0) / classes, smoothing)
    loss = loss + log_sum
    if z_loss:
        loss = loss + z_loss * (log_sum + m).square()
    return RowLosses(torch.where(ignored, 0.0, loss), m, s)

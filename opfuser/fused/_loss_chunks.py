"""A linear transformation and cross entropy, over chunks of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..basic._wgrad import add_wgrad, as_rows
from ..basic.basic_linear import linear_forward
from ..kernels.cross_entropy import (
    LossGradient,
    Terms,
    cross_entropy_forward,
    cross_entropy_gradient,
)

__all__ = ["Gradients", "Work", "split", "walk"]

# Up to so many chunks the gradient of a weight in halves is summed in halves.
_FEW = 4
# Rows of a chunk are a multiple of what the tiles of a GEMM are high.
_MULTIPLE = 256


class _Limits(NamedTuple):
    """How large chunks are.

    Attributes:
        rows: GEMMs with fewer lose speed.
        small: bytes of logits below which there are no more than FEW chunks, of that size.
        large: bytes of logits that no chunk exceeds, if the memory for a sum in fp32 is less than
            what larger chunks take.
    """

    rows: int
    small: int
    large: int


# At 8192 tokens and 128256 classes in halves 4 chunks of 2048 rows, 525 MB each.
_GPU = _Limits(1024, 1 << 27, 1 << 29)
# For the last level of cache. With 1024 tokens, d = 512 and 32000 classes in one thread, chunks of
# 128, 256, 512 and 1024 rows take 1.12, 1.04, 1.05 and 1.05 times as long as the GEMMs alone.
_CPU = _Limits(256, 1 << 24, 1 << 26)


class Split(NamedTuple):
    """Rows of a chunk, and in which dtype the weight's gradient is summed over chunks."""

    rows: int
    dtype: torch.dtype


def split(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Split:
    """How to walk over the rows of ``x``.

    A sum in halves is rounded once per chunk. Up to 4 chunks that is less than twice the error of
    one GEMM; beyond, the sum is in fp32, so that more chunks are made only where that memory is
    less than what larger chunks take. fp16 would not hold gradients before they are scaled.

    Args:
        dtype: of the weight's gradient.
    """
    rows, limits = x.shape[0], _CPU if x.is_cpu else _GPU
    whole = rows * weight.shape[0] * x.itemsize
    wide = torch.promote_types(dtype, torch.float32)
    chunks = max(min(_FEW, -(-whole // limits.small)), -(-whole // limits.large), 1)
    if chunks > _FEW and dtype == torch.bfloat16:
        sum_bytes = weight.numel() * wide.itemsize
        if whole // _FEW <= whole // chunks + sum_bytes:
            chunks = _FEW
    size = -(-rows // chunks)
    size = max(limits.rows, -(-size // _MULTIPLE) * _MULTIPLE)
    narrow = dtype == torch.bfloat16 and rows <= _FEW * size
    return Split(size, dtype if narrow else wide)


class Work(NamedTuple):
    """Rows of one call.

    Attributes:
        x, w: operands of the forward GEMM, of one dtype: (..., in), (out, in).
        targets: (rows,).
        divisor: divides the gradients, if given.
        terms: of the loss of a row.
        wants_dx: whether the gradient of x is wanted.
        dw_dtype: of the gradient of w; None: it is not wanted.
    """

    x: Tensor
    w: Tensor
    targets: Tensor
    divisor: Tensor | None
    terms: Terms
    wants_dx: bool
    dw_dtype: torch.dtype | None

    def gradient(self, logits: Tensor, part: slice) -> LossGradient:
        """Losses of some rows, and the gradient of their logits, which may take their place."""
        gradient: LossGradient = cross_entropy_gradient(
            logits, self.targets[part], self.divisor, self.terms
        )
        return gradient


Gradients = tuple[Tensor, Tensor | None, Tensor | None]


def walk(work: Work) -> Gradients:
    """Losses of rows; gradients of x and w, as far as they are wanted."""
    return _traced(work) if torch.compiler.is_compiling() else _walked(work)


def _walked(work: Work) -> Gradients:
    x, w, targets = work.x, work.w, work.targets
    rows = as_rows(x)
    size, sum_dtype = split(rows, w, work.dw_dtype or torch.float32)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if work.wants_dx else None
    dx_rows = None if dx is None else as_rows(dx)
    dw = None
    if work.dw_dtype is not None:
        make = torch.empty if targets.numel() else torch.zeros
        dw = make(w.shape, dtype=sum_dtype, device=w.device)
    buffer = _logits_like(rows[:size], w)
    losses = []
    for start in range(0, rows.shape[0], size):
        part = slice(start, start + size)
        logits = torch.mm(rows[part], w.t(), out=buffer[: rows[part].shape[0]])
        if dx is None and dw is None:
            losses.append(cross_entropy_forward(logits, targets[part], work.terms).loss)
            continue
        row_losses, dlogits = work.gradient(logits, part)
        losses.append(row_losses)
        if dx_rows is not None:
            torch.mm(dlogits, w, out=dx_rows[part])
        if dw is not None:
            _add_wgrad(dw, dlogits, rows[part], add=start > 0)
    return _joined(losses, x), dx, dw


def _traced(work: Work) -> Gradients:
    """The same without writing to tensors, which a tracer would have to undo."""
    x, w, dw_dtype = work.x, work.w, work.dw_dtype
    rows = as_rows(x)
    size, sum_dtype = split(rows, w, dw_dtype or torch.float32)
    losses, dxs, dw = [], [], None
    for start in range(0, max(rows.shape[0], 1), size):  # once without rows, for the shapes
        part = slice(start, start + size)
        row_losses, dlogits = work.gradient(linear_forward(rows[part], w), part)
        losses.append(row_losses)
        if work.wants_dx:
            dxs.append(torch.mm(dlogits, w))
        if dw_dtype is not None:
            product = _wgrad(dlogits, rows[part], sum_dtype)
            dw = product if dw is None else dw + product
    return _joined(losses, x), torch.cat(dxs).view(x.shape) if work.wants_dx else None, dw


def _joined(losses: list[Tensor], x: Tensor) -> Tensor:
    if len(losses) == 1:
        return losses[0]
    if not losses:
        return x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.cat(losses)


def _logits_like(rows: Tensor, w: Tensor) -> Tensor:
    """Memory for the logits of ``rows``, every row of it beginning at a 128-byte boundary.

    Kernels and GEMMs access 16 bytes at a time then; on a CPU they don't care.
    """
    classes = w.shape[0]
    multiple = 128 // rows.itemsize if rows.is_cuda else 1
    padded = -(-classes // multiple) * multiple
    buffer = torch.empty((rows.shape[0], padded), dtype=rows.dtype, device=rows.device)
    return buffer[:, :classes]


def _add_wgrad(out: Tensor, dy: Tensor, x: Tensor, *, add: bool) -> None:
    """As ``add_wgrad``, but on a CPU a product of halves is rounded before it is added to fp32.

    No GEMM does both there, and one in fp32 takes several times as long.
    """
    if out.dtype == dy.dtype or not out.is_cpu:
        add_wgrad(out, dy, x, add=add)
    elif add:
        out.add_(_wgrad(dy, x, out.dtype))
    else:
        out.copy_(_wgrad(dy, x, out.dtype))


def _wgrad(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``dyᵀ x`` in ``dtype``. fp16 would not hold the sum of gradients that nothing has divided."""
    if dy.dtype == torch.float16:
        dy, x = dy.to(dtype), x.to(dtype)
    return torch.mm(dy.t(), x).to(dtype)

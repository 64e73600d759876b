"""A linear transformation and cross entropy, over chunks of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import gemm
from ..basic.cross_entropy import classes_of, losses_of_slices
from ..distributed.collectives import VocabularySlice
from ..kernels.cross_entropy import cross_entropy_forward, cross_entropy_gradient
from ..kernels.cross_entropy_plain import LossGradient, Terms
from ..kernels.tracing import hint, pieces
from ..kernels.vocabulary_slices import slice_gradient
from ..runtime.tracing import functional

# Up to so many chunks the gradient of a bf16 weight is summed in bf16.
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


# At 8192 tokens and 128256 classes in bf16 4 chunks of 2048 rows, 525 MB each.
_GPU = _Limits(1024, 1 << 27, 1 << 29)
# For the last level of cache. With 1024 tokens, d = 512 and 32000 classes in one thread, chunks of
# 128, 256, 512 and 1024 rows take 1.12, 1.04, 1.05 and 1.05 times as long as the GEMMs alone.
_CPU = _Limits(256, 1 << 24, 1 << 26)


class Split(NamedTuple):
    """Rows of a chunk, and in which dtype the weight's gradient is summed over chunks."""

    rows: int
    dtype: torch.dtype


def split(
    x: Tensor, weight: Tensor, dtype: torch.dtype, own: VocabularySlice | None = None
) -> Split:
    """The chunks of the rows of ``x``.

    A sum in bf16 is rounded once per chunk. Up to 4 chunks that is less than twice the error of
    one GEMM; beyond, the sum is in fp32, so that more chunks are made only where that memory is
    less than what larger chunks take. fp16 would not hold gradients before they are scaled.

    Args:
        dtype: of the weight's gradient.
        own: which of the classes of several ranks ``weight`` has. All make the same chunks, those
            for the largest slice.
    """
    rows, limits = hint(x.shape[0]), _CPU if x.is_cpu else _GPU
    classes = weight.shape[0] if own is None else own.largest
    whole = rows * classes * x.itemsize
    wide = torch.promote_types(dtype, torch.float32)
    chunks = max(min(_FEW, -(-whole // limits.small)), -(-whole // limits.large), 1)
    if chunks > _FEW and dtype == torch.bfloat16:
        sum_bytes = classes * weight.shape[1] * wide.itemsize
        if whole // _FEW <= whole // chunks + sum_bytes:
            chunks = _FEW
    size = -(-rows // chunks)
    size = max(limits.rows, -(-size // _MULTIPLE) * _MULTIPLE)
    narrow = dtype == torch.bfloat16 and rows <= _FEW * size
    return Split(size, dtype if narrow else wide)


class Head(NamedTuple):
    """What the loss of one call is computed from.

    Attributes:
        x, w: operands of the forward GEMM, of one dtype: (..., in), (out, in).
        targets: (rows,).
        divisor: divides the gradients, if given.
        terms: of the loss of a row.
        wants_dx: whether the gradient of x is wanted.
        dw_dtype: of the gradient of w; None: it is not wanted.
        own: which of the classes of several ranks w has; None: there is one rank.
    """

    x: gemm.Operand
    w: gemm.Operand
    targets: Tensor
    divisor: Tensor | None
    terms: Terms
    wants_dx: bool
    dw_dtype: torch.dtype | None
    own: VocabularySlice | None = None

    def losses(self, logits: Tensor, chunk: slice) -> Tensor:
        """Losses of some rows."""
        targets = self.targets[chunk]
        if self.own is not None:
            return losses_of_slices(logits, targets, self.terms, self.own).loss
        return cross_entropy_forward(logits, targets, self.terms).loss

    def loss_gradient(self, logits: Tensor, chunk: slice) -> LossGradient:
        """Losses of some rows, and the gradient of their logits, which may take their place."""
        if self.own is not None:
            targets, terms, classes = self.targets[chunk], self.terms, classes_of(self.own)
            rows = losses_of_slices(logits, targets, terms, self.own)
            one, count = rows.loss.new_ones(()), self.divisor
            dx = slice_gradient(logits, targets, rows, one, count, terms, classes, True)
            return LossGradient(rows.loss, dx)
        gradient: LossGradient = cross_entropy_gradient(
            logits, self.targets[chunk], self.divisor, self.terms
        )
        return gradient


class LossesAndGradients(NamedTuple):
    """Losses of the rows, and the gradients of x and w, as far as they are wanted."""

    losses: Tensor
    dx: Tensor | None
    dw: Tensor | None


def losses_and_gradients(head: Head) -> LossesAndGradients:
    """All that forward and backward compute from the logits, chunk by chunk of the rows."""
    return _functional(head) if functional() else _in_place(head)


def _in_place(head: Head) -> LossesAndGradients:
    """With one chunk of logits in memory, and gradients written to where they belong."""
    x, w, targets = head.x, head.w, head.targets
    rows = gemm.as_rows(x)
    size, sum_dtype = split(rows, w, head.dw_dtype or torch.float32, head.own)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if head.wants_dx else None
    dx_rows = None if dx is None else gemm.as_rows(dx)
    dw = None
    if head.dw_dtype is not None:
        make = torch.empty if targets.numel() else torch.zeros
        dw = make(w.shape, dtype=sum_dtype, device=w.device)
    buffer = _logits_like(rows[:size], w)
    losses = []
    for start in range(0, rows.shape[0], size):
        chunk = slice(start, start + size)
        logits = gemm.forward_into(buffer[: rows[chunk].shape[0]], rows[chunk], w)
        if dx is None and dw is None:
            losses.append(head.losses(logits, chunk))
            continue
        row_losses, dlogits = head.loss_gradient(logits, chunk)
        losses.append(row_losses)
        if dx_rows is not None:
            gemm.dgrad_into(dx_rows[chunk], dlogits, w)
        if dw is not None:
            gemm.wgrad_into(dw, dlogits, rows[chunk], accumulate=start > 0, may_round=True)
    return LossesAndGradients(_joined(losses, x), dx, dw)


def _functional(head: Head) -> LossesAndGradients:
    """The same without writing to tensors, which a tracer would have to undo."""
    x, w, dw_dtype = head.x, head.w, head.dw_dtype
    rows = gemm.as_rows(x)
    size, sum_dtype = split(rows, w, dw_dtype or torch.float32, head.own)
    losses, dxs, dw = [], [], None
    for chunk in _chunks(rows.shape[0], size):
        row_losses, dlogits = head.loss_gradient(gemm.forward(rows[chunk], w), chunk)
        losses.append(row_losses)
        if head.wants_dx:
            dxs.append(gemm.dgrad(dlogits, w))
        if dw_dtype is not None:
            product = gemm.wgrad(dlogits, rows[chunk], dtype=sum_dtype)
            dw = product if dw is None else dw + product
    dx = torch.cat(dxs).view(x.shape) if head.wants_dx else None
    return LossesAndGradients(_joined(losses, x), dx, dw)


def _chunks(rows: int, size: int) -> list[slice]:
    """Chunks of the rows, one of them without rows, for the shapes."""
    if isinstance(rows, torch.SymInt):
        return pieces(rows, -(-hint(rows) // size), _MULTIPLE)
    return [slice(start, start + size) for start in range(0, max(rows, 1), size)]


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

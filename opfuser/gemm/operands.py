"""What products multiply: tensors, and weights whose rows are those of several matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..runtime.tracing import functional


class Stacked(NamedTuple):
    """The weight (N, K) whose rows are those of several matrices (N_i, K), N = Σ N_i.

    Attributes:
        matrices: of one dtype and device.
        whole: one view of all of them where they lie one behind another; else None. What reads or
            writes it is one product, and else one for each matrix.
    """

    matrices: tuple[Tensor, ...]
    whole: Tensor | None

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size((sum([m.shape[0] for m in self.matrices]), self.matrices[0].shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices."""
        return self.matrices[0].dtype

    @property
    def sizes(self) -> list[int]:
        """N_i."""
        return [m.shape[0] for m in self.matrices]

    def to(self, dtype: torch.dtype) -> Stacked:
        """The values in another dtype; one behind another where they were."""
        if self.whole is None:
            return Stacked(tuple([m.to(dtype) for m in self.matrices]), None)
        whole = self.whole.to(dtype)
        return Stacked(tuple(whole.split(self.sizes)), whole)


class Adapter(NamedTuple):
    """``s B A``, of some columns of the output.

    Attributes:
        a: A.
        b: B.
        scale: s.
        start: the first of the columns.
        mask: of d; None: every entry is kept.
        p: the probability with which entries are zeroed.
    """

    a: Tensor
    b: Tensor
    scale: float
    start: int = 0
    mask: Tensor | None = None
    p: float = 0.0


class LowRank(NamedTuple):
    """The weight W + Σ s_i B_i A_i, and a bias that belongs to it.

    Attributes:
        base: W; None in a backward pass that does not read it.
        bias: (N,) or None.
        adapters: of one dtype, that of W or a wider one.
    """

    base: Tensor | Stacked | None
    bias: Tensor | None
    adapters: tuple[Adapter, ...]

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        assert self.base is not None
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of W."""
        assert self.base is not None
        return self.base.dtype


# What a product multiplies. Callers pass it on, and read its shape and dtype alone: how its values
# are stored is known in this package.
Operand: TypeAlias = Tensor
Weight: TypeAlias = "Tensor | Stacked | LowRank"


def as_rows(x: Tensor) -> Tensor:
    """``x`` (..., D) as (rows, D). ``reshape(-1, D)`` is ambiguous where D is zero."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def mm(a: Tensor, b: Tensor, scale: float | None) -> Tensor:
    """``s a b``, with the factor applied inside the GEMM."""
    if scale is None:
        return torch.mm(a, b)
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def one_behind_another(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view, along the first dimension, of tensors that lie so in one storage; else None.

    Args:
        tensors: of one dtype, and of one shape but for the first dimension.
    """
    if functional():
        return None
    first, start, place = tensors[0], 0, 0
    for t in tensors:
        if type(t) is not nn.Parameter and type(t) is not Tensor:
            return None  # others need not have an address
        if not start:
            start = place = t.data_ptr()
        if t.data_ptr() != place or not t.is_contiguous():
            return None
        place += t.nbytes
    # Memory within one storage belongs to no other one.
    storage = first.untyped_storage()
    if not start or place > storage.data_ptr() + storage.nbytes():
        return None
    rows, cols = sum([len(t) for t in tensors]), first.shape[1:]
    return first.as_strided((rows, *cols), (*cols, 1))


def stacked(matrices: Sequence[Tensor]) -> Stacked:
    """The weight whose rows are those of ``matrices``."""
    return Stacked(tuple(matrices), one_behind_another(matrices))


def tensors_of(w: Weight) -> tuple[Tensor | None, ...]:
    """The tensors that a weight consists of, to be saved; those of low rank come last."""
    if isinstance(w, LowRank):
        assert w.base is not None  # as in every forward pass
        pairs = [(a.a, a.b, a.mask) for a in w.adapters]
        return (*tensors_of(w.base), w.bias, *(t for kind in zip(*pairs) for t in kind))
    return w.matrices if isinstance(w, Stacked) else (w,)


def weight_of(tensors: Sequence[Tensor]) -> Tensor | Stacked:
    """The weight that consists of these tensors: the inverse of :func:`tensors_of`.

    Weights of low rank consist of more than tensors.
    """
    return tensors[0] if len(tensors) == 1 else stacked(tensors)


def joined(w: Tensor | Stacked) -> Tensor:
    """(N, K) in one piece: a copy where its matrices do not lie one behind another."""
    if not isinstance(w, Stacked):
        return w
    return torch.cat(w.matrices) if w.whole is None else w.whole

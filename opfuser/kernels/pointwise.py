"""Runs of element-wise operations as chains: one kernel forward, one backward.

In forward the norm of the result can be part of that kernel.

Dimensions: R rows, which are all dimensions but the last, C columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import pointwise_plain as plain
from .launch import AVAILABLE, DTYPES, INTERPRETED, Launch, runs
from .norm_launch import MAX_CHAIN_ROW
from .pointwise_launch import (
    BackwardLaunch,
    choose_backward,
    choose_forward,
    choose_forward_norm,
    launch_backward,
    padded,
    reads_of,
    size_of,
)
from .pointwise_plain import BIAS, DROPOUT, FUNCTION, KEEP, ChainGrads, ChainResult, Link, Wants
from .tiling import TiledLaunch, cdiv, empty_contiguous


def has_kernels(x: Tensor) -> bool:
    """Whether chains on ``x`` are kernels, if their operands have dtypes that these read."""
    return runs(x)


def draws_seeds(x: Tensor) -> bool:
    """Whether dropout of x, in any dtype, computes its mask from a seed instead of storing it."""
    return runs(x) or (AVAILABLE and (x.is_cuda or INTERPRETED))


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """``x / (1 - p)`` where the seed keeps it, else 0; contiguous. Its own gradient, for x = dy."""
    if not has_kernels(x):
        return plain.dropout(x, seed, p)
    return _dropout_chain(p).forward(x, (seed,), (x.dtype,)).y


@functools.lru_cache(None)
def _dropout_chain(p: float) -> Chain:
    return Chain([Link(DROPOUT, parameters=(p,))])


class Normed(NamedTuple):
    """The norm of a chain's result, and what else the kernel wrote.

    Attributes:
        y: the norm.
        total: the chain's result, None unless it was wanted.
        mean: of the rows of total; None for RMSNorm.
        rstd: of the rows of total.
        kept: as ``Chain.forward`` returns it.
    """

    y: Tensor
    total: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    kept: list[Tensor | None]


class Chain:
    """A run of element-wise operations. It keeps what it launches.

    Attributes:
        reads: for each link, whether backward needs its operand; that of a KEEP is what it kept.
        reads_x: whether backward needs the input.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)
        self.reads, self.reads_x = reads_of(self.links)
        self._by_rows = any(link.kind in (BIAS, DROPOUT) for link in links)
        kinds = [(i, link.kind) for i, link in enumerate(self.links)]
        self._holders = [(i, kind) for i, kind in kinds if kind != FUNCTION]
        self._forwards: dict[Any, TiledLaunch] = {}
        self._norms: dict[Any, tuple[Launch, int]] = {}
        self._backwards: dict[Any, BackwardLaunch] = {}

    def __reduce__(self) -> Any:
        return Chain, (self.links,)

    def forward(
        self, x: Tensor, operands: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]
    ) -> ChainResult:
        """The result of the links, and what they kept.

        Args:
            operands: for each link its bias, its seed or what it adds, else None.
            dtypes: of the results of the links.
        """
        kept: list[Tensor | None] = [None] * len(self.links)
        pointers = self._pointers(x, operands, dtypes, kept)
        if pointers is None:
            return plain.forward(self.links, x, operands, dtypes)
        y = empty_contiguous(x, dtypes[-1])
        rows, cols = size_of(x, self._by_rows)
        key = cols, x.dtype
        tiled = self._forwards.get(key)
        if tiled is None:
            tiled = self._forwards[key] = choose_forward(self.links, cols, x.itemsize)
        blocks, slices = tiled.slices(x, rows, cols)
        tensors = (x.contiguous(), y, *padded(pointers))
        tiled.launch((blocks * slices, 1, 1), tensors, (rows, cols, slices))
        return ChainResult(y, kept)

    def forward_norm(
        self,
        x: Tensor,
        operands: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype],
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        zero_centered: bool,
        *,
        with_mean: bool,
        want_total: bool,
    ) -> Normed | None:
        """The norm, over the last dimension, of the result of the links, by one kernel.

        Args:
            operands, dtypes: as in ``forward``.
            weight, bias, eps, zero_centered: as in ``norm.norm_forward``.
            with_mean: whether the norm is LayerNorm, else RMSNorm.
            want_total: whether to write the result of the links too, in the last of ``dtypes``.

        Returns:
            None where no kernel does both: where ``forward`` launches none either, and for rows
            that registers do not hold. Else y and total in the dtype of the links' result and the
            shape of x, and for each row its statistics in fp32; all contiguous.
        """
        cols, dtype = x.shape[-1], dtypes[-1] if dtypes else x.dtype
        row = cols * max(x.itemsize, dtype.itemsize)
        if not 0 < row <= MAX_CHAIN_ROW or dtype not in DTYPES:
            return None
        kept: list[Tensor | None] = [None] * len(self.links)
        pointers = self._pointers(x, operands, dtypes, kept)
        if pointers is None:
            return None
        key = cols, x.dtype, zero_centered
        found = self._norms.get(key)
        if found is None:
            found = self._norms[key] = choose_forward_norm(
                self.links, cols, x.itemsize, zero_centered
            )
        launch, block_rows = found
        y = empty_contiguous(x, dtype)
        total = torch.empty_like(y) if want_total else None
        rstd = x.new_empty(*x.shape[:-1] or ((),), dtype=torch.float32)
        mean = torch.empty_like(rstd) if with_mean else None
        rows = rstd.numel()
        parameters = weight.contiguous(), None if bias is None else bias.contiguous()
        tensors = (x.contiguous(), *parameters, y, total, mean, rstd, *padded(pointers))
        launch((cdiv(rows, block_rows), 1, 1), tensors, (rows, cols), (eps, 1 / cols))
        return Normed(y, total, mean, rstd, kept)

    def _pointers(
        self,
        x: Tensor,
        operands: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype],
        kept: list[Tensor | None],
    ) -> list[Tensor] | None:
        """What the links read and keep besides x, or None where no kernel runs them.

        Memory for what is kept is put into ``kept`` too.
        """
        if not self.links or not has_kernels(x):
            return None
        pointers: list[Tensor] = []
        for i, kind in self._holders:
            operand = operands[i]
            if kind == KEEP:
                operand = kept[i] = empty_contiguous(x, dtypes[i])
            elif operand is None or not _fits(kind, operand):
                return None
            pointers.append(operand.contiguous())
        return pointers

    def backward(
        self,
        dy: Tensor,
        x: Tensor | None,
        operands: Sequence[Tensor | None],
        wants: Wants,
        dtypes: tuple[torch.dtype, ...],
    ) -> ChainGrads:
        """Gradients of the input and of the operands, as far as they are wanted.

        Args:
            x: the input, where ``reads_x``.
            operands: those that ``reads`` names.
            wants: for each link the dtype in which the gradient of its bias is wanted, or whether
                that of what it adds is; at the end whether that of the input is.
            dtypes: as in forward.
        """
        if not has_kernels(dy) or (x is not None and x.dtype not in DTYPES):
            return plain.backward(self.links, dy, x, operands, wants, dtypes)
        rows, cols = size_of(dy, self._by_rows)
        key = wants, cols, dy.dtype, dtypes
        how = self._backwards.get(key)
        if how is None:
            how = self._backwards[key] = choose_backward(self.links, *key)
        pointers: list[Tensor | None] = []
        for i in how.reads:
            operand = operands[i]
            if operand is None or not _fits(self.links[i].kind, operand):
                return plain.backward(self.links, dy, x, operands, wants, dtypes)
            pointers.append(operand.contiguous())
        written = [torch.empty(dy.shape, dtype=dtype, device=dy.device) for dtype in how.written]
        grads = [None if n is None else dy if n < 0 else written[n] for n in how.which]
        if how.tiled is not None:
            pointers += written
            x = x.contiguous() if how.reads_x and x is not None else None
            sums = [(i, _bias_grad(wants[i], dy)) for i in how.sums]
            launch_backward(
                how.tiled, dy.contiguous(), x, pointers, [db for _, db in sums], (rows, cols)
            )
            for i, db in sums:
                grads[i] = db
        return ChainGrads(grads.pop(), grads)


def _fits(kind: int, operand: Tensor) -> bool:
    return kind == DROPOUT or operand.dtype in DTYPES


def _bias_grad(dtype: Any, dy: Tensor) -> Tensor:
    """Memory for the gradient of a bias."""
    return torch.empty(dy.shape[-1], dtype=dtype, device=dy.device)

"""The three products of one matrix.

Symbols: K input features, N output features; x (..., K), W (N, K), y and dy (..., N). Operands of
one product are of one dtype, except that dy is cast to that of the other operand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..kernels.scalar import cast
from ..runtime.tracing import keeps_products
from .low_rank import add_low_rank, add_low_rank_dgrad
from .operands import LowRank, Operand, Stacked, Weight, as_rows, mm
from .stacked import stacked_dgrad, stacked_forward

# Columns from which two products in cuBLAS's fast kernels take less time than one in others.
_MANY = 4096


def forward(
    x: Operand,
    w: Weight,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    add: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """``y = s x Wᵀ + b + z``.

    Args:
        bias: b, (N,), of the dtype of the operands.
        add: z, of the shape and dtype of y.
        in_place: whether y may be written over z. Else the GEMM starts from a copy of z.
    """
    if isinstance(w, LowRank):
        assert w.base is not None
        own = w.bias if scale is None or w.bias is None else w.bias * scale
        both = own if bias is None else bias if own is None else own + bias
        y = forward(x, w.base, both, scale=scale, add=add, in_place=in_place)
        return add_low_rank(y, x, w, scale)
    if isinstance(w, Stacked):
        if w.whole is None:
            return stacked_forward(x, w, bias, scale=scale, add=add, in_place=in_place)
        w = w.whole
    if add is None and scale is None:
        return linear(x, w, bias)
    if add is not None:
        return _forward_add(add, x, w, bias, scale, in_place=in_place)
    y = mm(as_rows(x), w.t(), scale).view(*x.shape[:-1], w.shape[0])
    return y if bias is None else _plus(y, bias)


def _plus(y: Tensor, z: Tensor) -> Tensor:
    """``y + z`` for a product y."""
    return y + z if keeps_products() else y.add_(z)


def _forward_add(
    z: Tensor, x: Operand, w: Operand, bias: Tensor | None, scale: float | None, *, in_place: bool
) -> Tensor:
    in_place = in_place and z.is_contiguous()
    if bias is not None and scale is None and not (z.is_cpu and in_place):
        # The GEMM's epilogue adds the bias for nothing: on an H200 395 us for (8192, 4096) times
        # (4096, 4096) in bf16 and a sum, where a GEMM that starts from z + b takes 464. On a CPU
        # both take the same, and four views fewer are made; in place there, z + b takes no memory.
        y = linear(x, w, bias)
        return z.add_(y) if in_place else _plus(y, z)
    alpha = 1 if scale is None else scale
    if in_place:
        # On that H200 352 us, where the GEMM alone takes 348, and 384 if z has to be copied.
        rows = as_rows(z)
        (rows if bias is None else rows.add_(bias)).addmm_(as_rows(x), w.t(), alpha=alpha)
        return z
    rows = as_rows(z) if bias is None else as_rows(z) + bias
    y = torch.addmm(rows, as_rows(x), w.t(), alpha=alpha)
    return y if z.dim() == 2 else y.view_as(z)  # 1 us less than by a torch.Size


def forward_into(out: Tensor, x: Operand, w: Operand) -> Tensor:
    """``y = x Wᵀ`` for x (rows, K), written to ``out`` (rows, N), which is returned."""
    cut = _cut(out)
    if cut:
        torch.mm(x, w[cut:].t(), out=out[:, cut:])
        torch.mm(x, w[:cut].t(), out=out[:, :cut])
        return out
    return torch.mm(x, w.t(), out=out)


def _cut(y: Tensor) -> int:
    """Where to cut the columns of ``y`` (rows, N) and multiply both pieces apart; 0: nowhere.

    cuBLAS takes its fast kernels only for sizes that are multiples of 16 bytes, even if every row
    begins at one. The rest, fewer than 16 bytes of each row, is a product of next to no work.
    """
    multiple = 16 // y.itemsize
    rest = y.shape[-1] % multiple
    if not rest or not y.is_cuda or y.shape[-1] < _MANY or y.stride(-2) % multiple:
        return 0
    return y.shape[-1] - rest


def dgrad(
    dy: Operand,
    w: Weight,
    *,
    scale: float | None = None,
    add: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """``dx = s dy W + g``, in the dtype of W; with a g of another dtype, in torch's promotion.

    Args:
        add: g, gradient of x from elsewhere, (..., K).
        in_place: whether dx may be written over g. Else the GEMM starts from a copy of g.
    """
    if isinstance(w, LowRank):
        assert w.base is not None
        if add is not None and add.dtype != w.dtype:
            return dgrad(dy, w, scale=scale) + add
        dx = dgrad(dy, w.base, scale=scale, add=add, in_place=in_place)
        return add_low_rank_dgrad(dx, dy, w, scale)
    if isinstance(w, Stacked):
        if w.whole is None:
            return stacked_dgrad(dy, w, scale=scale, add=add, in_place=in_place)
        w = w.whole
    if dy.dtype != w.dtype:
        dy = dy.to(w.dtype)
    if add is None:
        if scale is None and dy.is_contiguous():
            # Flattens and restores dimensions by itself: in Python 2 us more.
            return torch.matmul(dy, w)
        if dy.dim() == 2:
            return mm(dy, w, scale)
        return mm(as_rows(dy), w, scale).view(*dy.shape[:-1], w.shape[1])
    if add.dtype != w.dtype:
        return dgrad(dy, w, scale=scale) + add
    alpha = 1 if scale is None else scale
    if in_place and add.is_contiguous():
        as_rows(add).addmm_(as_rows(dy), w, alpha=alpha)
        return add
    dx = torch.addmm(as_rows(add), as_rows(dy), w, alpha=alpha)
    return dx if add.dim() == 2 else dx.view_as(add)


def dgrad_into(out: Tensor, dy: Operand, w: Operand) -> Tensor:
    """``dx = dy W`` for dy (rows, N), written to ``out`` (rows, K), which is returned."""
    cut = _cut(dy)
    if cut:
        # The small term first: what is rounded twice is no more than that.
        torch.mm(dy[:, cut:], w[cut:], out=out)
        return out.addmm_(dy[:, :cut], w[:cut])
    return torch.mm(dy, w, out=out)


def wgrad(
    dy: Operand, x: Operand, *, scale: float | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``dW = s dyᵀ x`` over all rows.

    Args:
        dtype: of dW; None is that of x. fp16 operands are cast to it first, since fp16 need not
            hold the sum; of bf16 operands the result is cast.
    """
    if dtype is not None and x.dtype == torch.float16:
        x = cast(x, dtype)
    if dy.dtype != x.dtype:
        dy = dy.to(x.dtype)
    if dy.dim() != 2:
        dy = as_rows(dy)
    if x.dim() != 2:
        x = as_rows(x)
    dw = mm(dy.t(), x, scale)
    return dw if dtype is None else cast(dw, dtype)


def wgrad_into(
    out: Tensor,
    dy: Operand,
    x: Operand,
    *,
    accumulate: bool,
    scale: float | None = None,
    may_round: bool = False,
) -> None:
    """``out += s dyᵀ x`` if ``accumulate``, else ``out = s dyᵀ x``.

    Computes in the wider of the dtypes: a product of half precision is not rounded on its way to
    fp32. On a GPU the GEMM itself takes fp16 or bf16 and adds to fp32: 8 bytes of traffic per
    element of ``out``.

    Args:
        may_round: allows a bf16 product to be rounded before it is added to fp32, where no GEMM
            does both: on a CPU, where one in fp32 takes several times as long. fp16 is not rounded,
            as in :func:`wgrad`.
    """
    dy, x = as_rows(cast(dy, x.dtype)), as_rows(x)
    cut = _cut(dy)
    if cut:
        how: Any = {"accumulate": accumulate, "scale": scale, "may_round": may_round}
        wgrad_into(out[cut:], dy[:, cut:], x, **how)
        wgrad_into(out[:cut], dy[:, :cut], x, **how)
        return
    alpha = 1 if scale is None else scale
    plain = not accumulate and alpha == 1  # what a GEMM without terms does
    if out.dtype != x.dtype:
        if may_round and out.is_cpu:
            product = wgrad(dy, x, scale=scale, dtype=out.dtype)
            out.add_(product) if accumulate else out.copy_(product)
            return
        wide = torch.promote_types(out.dtype, x.dtype)
        if out.is_cuda and wide == out.dtype == torch.float32:
            if plain:
                torch.ops.aten.mm.dtype_out(dy.t(), x, wide, out=out)
            else:
                addmm = torch.ops.aten.addmm.dtype_out
                addmm(out, dy.t(), x, wide, beta=int(accumulate), alpha=alpha, out=out)
            return
        dy, x = dy.to(wide), x.to(wide)
        if out.dtype != wide:
            product = torch.mm(dy.t(), x)
            if accumulate:
                out.add_(product, alpha=alpha)
            else:
                torch.mul(product, alpha, out=out)
            return
    if plain:
        torch.mm(dy.t(), x, out=out)
    else:
        out.addmm_(dy.t(), x, beta=int(accumulate), alpha=alpha)

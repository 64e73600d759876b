"""The three products of a linear operation whose operands are fp8 codes with scales.

Symbols as in :mod:`.products`; T rows, Tp of them with padding. A GPU multiplies matrices whose
inner dimension is contiguous in both, so that each product takes other layouts of its operands:
forward x and W by rows, dgrad dy by rows and W by columns, wgrad dy and x by columns. Elsewhere the
same codes are multiplied in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from ..kernels.quantize import Codes

__all__ = ["Accumulation", "scaled_dgrad", "scaled_forward", "scaled_wgrad"]

_BLOCK = 128


class Accumulation(NamedTuple):
    """How a product is computed.

    Attributes:
        dtype: of the result.
        split: whether to add up in fp32 after every 128 products.
        hardware: whether the device multiplies fp8.
    """

    dtype: torch.dtype
    split: bool
    hardware: bool


class _Matrix(NamedTuple):
    """Codes (M, K) and their inverse scales.

    These are (1,), (K / 128, M) for blocks, or (M / 128, at least K / 128) for squares.
    """

    codes: Tensor
    scale: Tensor
    squares: bool = False

    @property
    def kind(self) -> ScalingType:
        if self.scale.dim() == 1:
            return ScalingType.TensorWise
        return ScalingType.BlockWise128x128 if self.squares else ScalingType.BlockWise1x128

    def values(self, block: slice) -> Tensor:
        """Some columns in fp32; with one scale it is left out, for the product to apply."""
        values = self.codes[:, block].float()
        if self.kind is ScalingType.TensorWise:
            return values
        n = block.start // _BLOCK
        if self.squares:
            return values * self.scale[:, n].repeat_interleave(_BLOCK)[: len(values), None]
        return values * self.scale[n][:, None]


def _rows(codes: Codes, *, squares: bool = False) -> _Matrix:
    assert codes.rows is not None
    assert codes.row_scale is not None
    return _Matrix(codes.rows, codes.row_scale, squares)


def _cols(codes: Codes, *, squares: bool = False) -> _Matrix:
    assert codes.cols is not None
    assert codes.col_scale is not None
    return _Matrix(codes.cols, codes.col_scale, squares)


def _product(a: _Matrix, b: _Matrix, how: Accumulation, bias: Tensor | None = None) -> Tensor:
    """``a bᵀ + bias``, (M, N), for a (M, K) and b (N, K)."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    if not (m and n and k):
        y = torch.zeros(m, n, dtype=how.dtype, device=a.codes.device)
        return y if bias is None else y.add_(bias)
    if how.hardware:
        fused = bias is not None and how.dtype == bias.dtype == torch.bfloat16
        y = F.scaled_mm(
            a.codes,
            b.codes.t(),
            a.scale.t(),  # of one dimension: itself
            a.kind,
            b.scale.t(),
            b.kind,
            bias=bias if fused else None,
            output_dtype=how.dtype,
            use_fast_accum=not how.split,
        )
        return y if fused or bias is None else y.add_(bias)
    total = torch.zeros(m, n, dtype=torch.float32, device=a.codes.device)
    for start in range(0, k, _BLOCK):
        block = slice(start, start + _BLOCK)
        total.addmm_(a.values(block), b.values(block).t())
    if a.kind is ScalingType.TensorWise:
        total.mul_(a.scale * b.scale)
    if bias is not None:
        total.add_(bias)
    return total.to(how.dtype)


def scaled_forward(
    x: Codes, w: Codes, shape: tuple[int, int], bias: Tensor | None, how: Accumulation
) -> Tensor:
    """``y = x Wᵀ + b`` for x (T, K) and W (N, K), both by rows.

    Args:
        x, w: operands.
        shape: (T, N).
        bias: b, (N,).
        how: see there.
    """
    rows, features = shape
    matrix = _rows(w, squares=_in_blocks(x.row_scale))
    return _product(_rows(x), matrix._replace(codes=matrix.codes[:features]), how, bias)[:rows]


def scaled_dgrad(dy: Codes, w: Codes, rows: int, how: Accumulation) -> Tensor:
    """``dx = dy W``, (T, K), for dy (T, N) by rows and W (N, K) by columns; T is ``rows``."""
    left, right = _rows(dy), _cols(w, squares=_in_blocks(dy.row_scale))
    features = left.codes.shape[1]
    return _product(left, right._replace(codes=right.codes[:, :features]), how)[:rows]


def scaled_wgrad(dy: Codes, x: Codes, how: Accumulation) -> Tensor:
    """``dW = dyᵀ x``, (N, K), for dy (T, N) and x (T, K), both by columns."""
    return _product(_cols(dy), _cols(x), how)


def _in_blocks(scale: Tensor | None) -> bool:
    """Whether this scale of an activation is for blocks; the weight then has those of squares."""
    return scale is not None and scale.dim() == 2

"""The three products of a linear operation whose operands are codes with scales.

Symbols as in :mod:`.products`; T rows, Tp of them with padding. A GPU multiplies matrices whose
inner dimension is contiguous in both, so that each product takes other layouts of its operands:
forward x and W by rows, dgrad dy by rows and W by columns, wgrad dy and x by columns. Elsewhere the
same codes are multiplied in fp32.

Products of MXFP8 and NVFP4 have never run on a GPU that multiplies them; what is passed to
``scaled_mm`` is tested against torch's own checks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from ..gemm_providers import GemmOperand, GemmProvider
from ..kernels.microscaling import decode
from ..kernels.microscaling_plain import E8M0, FP4, TAIL, scales_of_columns, tensor_scale
from ..kernels.quantize import Codes

_BLOCK, _FP32 = 128, torch.float32


class Accumulation(NamedTuple):
    """How a product is computed.

    Attributes:
        dtype: of the result.
        split: whether to accumulate in fp32 after every 128 products.
        hardware: whether the device multiplies such codes.
        provider: that which the recipe names, if it takes the product; None: torch.
    """

    dtype: torch.dtype
    split: bool
    hardware: bool
    provider: GemmProvider | None = None


class _Scales(NamedTuple):
    """Scales of an operand, as ``scaled_mm`` takes them."""

    scales: list[Tensor]
    kinds: list[ScalingType]
    swizzles: list[SwizzleType] | None = None


class _Matrix(NamedTuple):
    """Codes (M, K) and their inverse scales.

    These are (1,), (K / 128, M) for blocks, (M / 128, at least K / 128) for squares, or those of
    ``kernels.microscaling``, whose codes of 4 bits are (M, K / 2).
    """

    codes: Tensor
    scale: Tensor
    squares: bool = False

    @property
    def kind(self) -> ScalingType:
        if self.codes.dtype == FP4:
            return ScalingType.BlockWise1x16
        if self.scale.dtype == E8M0:
            return ScalingType.BlockWise1x32
        if self.scale.dim() == 1:
            return ScalingType.TensorWise
        return ScalingType.BlockWise128x128 if self.squares else ScalingType.BlockWise1x128

    @property
    def operand(self) -> GemmOperand:
        """As providers take it."""
        return GemmOperand(self.codes, self.scale, self.kind)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""
        rows, cols = self.codes.shape
        return rows, 2 * cols if self.codes.dtype == FP4 else cols

    @property
    def scales(self) -> _Scales:
        kind, swizzle = self.kind, SwizzleType.SWIZZLE_32_4_4
        if kind is ScalingType.BlockWise1x32:
            return _Scales([self.scale], [kind], [swizzle])
        if kind is ScalingType.BlockWise1x16:
            blocks, one = self.scale[:-TAIL], tensor_scale(self.codes, self.scale)
            kinds, swizzles = [kind, ScalingType.TensorWise], [swizzle, SwizzleType.NO_SWIZZLE]
            return _Scales([blocks, one], kinds, swizzles)
        # A view takes a microsecond, six of them for each linear operation.
        return _Scales([self.scale if self.scale.dim() == 1 else self.scale.t()], [kind])

    @property
    def factor(self) -> Tensor | None:
        """The scale of the whole matrix, which :meth:`values` leaves for the product to apply."""
        return self.scale if self.kind is ScalingType.TensorWise else None

    @property
    def decoded(self) -> _Matrix:
        """The same without scales of 32 or 16: their values in bf16."""
        if self.kind is ScalingType.BlockWise1x16:
            return _Matrix(decode(self.codes, self.scale), tensor_scale(self.codes, self.scale))
        if self.kind is ScalingType.BlockWise1x32:
            return _Matrix(decode(self.codes, self.scale), self.scale.new_ones(1, dtype=_FP32))
        return self

    def values(self, start: int) -> Tensor:
        """128 columns, or the rest, in fp32."""
        values = self.codes[:, start : start + _BLOCK].float()
        if self.kind is ScalingType.TensorWise:
            return values
        n = start // _BLOCK
        if self.squares:
            return values * self.scale[:, n].repeat_interleave(_BLOCK)[: len(values), None]
        return values * self.scale[n][:, None]

    def narrowed(self, cols: int) -> _Matrix:
        """The first of its columns: what is left out are codes of padding."""
        shape = self.shape
        if cols == shape[1]:
            return self
        if self.kind is ScalingType.BlockWise1x16:
            # Tiles of scales have 64 columns: padding to 128 may have one too many.
            scale = scales_of_columns(self.scale, shape, cols)
            return _Matrix(self.codes[:, : cols // 2], scale)
        return self._replace(codes=self.codes[:, :cols])


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
    (m, k), n = a.shape, b.codes.shape[0]
    if not (m and n and k):
        y = torch.zeros(m, n, dtype=how.dtype, device=a.codes.device)
        return y if bias is None else y.add_(bias)
    if how.provider is not None:
        y = how.provider.multiply(a.operand, b.operand, how.dtype, how.split)
        return y if bias is None else y.add_(bias)
    if how.hardware:
        fused = bias is not None and how.dtype == bias.dtype == torch.bfloat16
        left, right = a.scales, b.scales
        y = F.scaled_mm(
            a.codes,
            b.codes.t(),
            left.scales,
            left.kinds,
            right.scales,
            right.kinds,
            left.swizzles,
            right.swizzles,
            bias=bias if fused else None,
            output_dtype=how.dtype,
            use_fast_accum=not how.split,
        )
        return y if fused or bias is None else y.add_(bias)
    a, b = a.decoded, b.decoded
    total = torch.zeros(m, n, dtype=_FP32, device=a.codes.device)
    for start in range(0, k, _BLOCK):
        total.addmm_(a.values(start), b.values(start).t())
    if a.factor is not None and b.factor is not None:
        total.mul_(a.factor * b.factor)
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
    return _first(_product(*_of_forward(x, w, features), how, bias), rows)


def _of_forward(x: Codes, w: Codes, features: int) -> tuple[_Matrix, _Matrix]:
    matrix = _rows(w, squares=_in_blocks(x.row_scale))
    return _rows(x), matrix._replace(codes=_first(matrix.codes, features))


def scaled_dgrad(dy: Codes, w: Codes, rows: int, how: Accumulation) -> Tensor:
    """``dx = dy W``, (T, K), for dy (T, N) by rows and W (N, K) by columns; T is ``rows``."""
    return _first(_product(*_of_dgrad(dy, w), how), rows)


def _of_dgrad(dy: Codes, w: Codes) -> tuple[_Matrix, _Matrix]:
    left, right = _rows(dy), _cols(w, squares=_in_blocks(dy.row_scale))
    return left, right.narrowed(left.shape[1])


def scaled_wgrad(dy: Codes, x: Codes, how: Accumulation) -> Tensor:
    """``dW = dyᵀ x``, (N, K), for dy (T, N) and x (T, K), both by columns."""
    return _product(_cols(dy), _cols(x, squares=x.has_square_cols), how)


def _first(x: Tensor, rows: int) -> Tensor:
    """The first rows of x; a view takes a microsecond."""
    return x if x.shape[0] == rows else x[:rows]


def _in_blocks(scale: Tensor | None) -> bool:
    """Whether this scale of an activation is for blocks; the weight then has those of squares."""
    return scale is not None and scale.dim() == 2

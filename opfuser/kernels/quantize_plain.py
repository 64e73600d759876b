"""Quantization to fp8 in plain torch. Dimensions and layouts as in ``opfuser.kernels.quantize``.

Codes, scales and maxima are those of the kernels, bit for bit; only the sign of a NaN is open.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# Columns, or rows, that share a scale; and what rows are padded to.
BLOCK = 128

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Codes(NamedTuple):
    """A quantized matrix of R rows and C columns, row by row, column by column or both.

    What is not wanted is None. Rp is R rounded up to a multiple of 128; codes of padding are 0.
    Scales are inverse, in fp32: code times scale is the value. Those of MXFP8 and NVFP4, and the
    codes of the latter, are as ``kernels.microscaling`` says.

    Attributes:
        rows: (Rp, C), fp8.
        row_scale: its scales: (1,); or (C/128, Rp), of blocks; or (Rp/128, up4(C/128)), of squares,
            up4 being the next multiple of 4.
        cols: (C, Rp), fp8: the transpose, contiguous.
        col_scale: its scales: (1,); or (Rp/128, C), of blocks; or (C/128, up4(Rp/128)), of squares,
            as :attr:`has_square_cols` says.
        column_sum: (C,), what was quantized summed over the rows, in its dtype.
    """

    rows: Tensor | None
    row_scale: Tensor | None
    cols: Tensor | None
    col_scale: Tensor | None
    column_sum: Tensor | None

    @property
    def has_square_cols(self) -> bool:
        """Whether codes by columns have the scales of squares."""
        cols, scale = self.cols, self.col_scale
        if cols is None or scale is None or scale.dim() == 1:
            return False
        # Shapes of the two kinds never agree: C is at least 128.
        return scale.shape != (cols.shape[1] // BLOCK, cols.shape[0])


class TensorScaling(NamedTuple):
    """One given scale for a tensor.

    Attributes:
        scale: s, (1,) in fp32; None: nothing is encoded, amax alone is raised.
        dtype: of the codes.
        amax: (1,) in fp32, not negative, or None; becomes ``max(amax, max |x|)`` in place, and NaN
            wins.
    """

    scale: Tensor | None
    dtype: torch.dtype
    amax: Tensor | None = None


class MeasuredScaling(NamedTuple):
    """One scale for a tensor, from its largest value: :func:`scale_for` of that.

    Who quantizes computes the scale, so that no launch of its own stands between.

    Attributes:
        amax: (1,) in fp32, ``max |x|``.
        dtype: of the codes.
        power_of_two: whether the scale is a power of two.
    """

    amax: Tensor
    dtype: torch.dtype
    power_of_two: bool = False


class BlockScaling(NamedTuple):
    """A scale for each 128 neighbors along a row, for columns along a column.

    Attributes:
        dtype: of the codes.
        power_of_two: whether scales are powers of two.
        square_cols: whether codes by columns have a scale for each 128 × 128 instead, as weights.
    """

    dtype: torch.dtype
    power_of_two: bool = True
    square_cols: bool = False


Scaling = TensorScaling | MeasuredScaling | BlockScaling


def largest(dtype: torch.dtype) -> float:
    """The largest finite value of an fp8 dtype."""
    return _LARGEST[dtype]


def amax_plain(x: Tensor) -> Tensor:
    """``max |x|`` in fp32, shape (1,): NaN if one element is; 0 of an empty x. Reads x once."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, float("inf"))
    return norm.to(torch.float32).view(1)


def raise_amax(amax: Tensor | None, x: Tensor) -> None:
    """``amax`` becomes ``max(amax, max |x|)``, in place; NaN wins."""
    if amax is not None:
        torch.maximum(amax, amax_plain(x), out=amax)


def scale_for(
    amax: Tensor, dtype: torch.dtype, power_of_two: bool = False, margin: int = 0
) -> Tensor:
    """Scales ``s = largest / amax / 2^margin`` in fp32, in the shape of amax.

    ``largest / amax`` is 1 where amax is 0, the largest finite value instead of infinity, and NaN
    where amax is not finite: a saturating code would hide that. With ``power_of_two`` it is rounded
    down to a power of two.
    """
    top = torch.scalar_tensor(_LARGEST[dtype], dtype=torch.float32, device=amax.device)
    s = (top / amax).clamp_(max=torch.finfo(torch.float32).max)  # rounded once, unlike 448 / amax
    s.masked_fill_(amax == 0, 1.0)
    if power_of_two:
        s.view(torch.int32).bitwise_and_(0x7F800000)
    s.masked_fill_(amax.isfinite().logical_not_(), float("nan"))
    return s.mul_(2.0**-margin) if margin else s


def given_scaling(scaling: TensorScaling | MeasuredScaling) -> TensorScaling:
    """``scaling`` with its scale."""
    if isinstance(scaling, TensorScaling):
        return scaling
    amax, dtype, power_of_two = scaling
    return TensorScaling(scale_for(amax, dtype, power_of_two), dtype)


def encode(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of ``x s``, rounded to nearest even, saturating; NaN stays NaN."""
    top = _LARGEST[dtype]
    # Clamped first: torch 2.11 makes NaN of what is larger.
    return (x.to(torch.float32) * scale).clamp_(-top, top).to(dtype)


def _padded(x: Tensor) -> Tensor:
    """With rows of zeros up to a multiple of 128."""
    missing = -x.shape[0] % BLOCK
    return pad(x, (0, 0, 0, missing)) if missing else x


def by_tensor_plain(
    x: Tensor,
    scaling: TensorScaling | MeasuredScaling,
    rows: bool,
    cols: bool,
    column_sum: bool = False,
) -> Codes:
    """As ``quantize.quantize`` with one scale; without it amax alone is raised."""
    scale, dtype, amax = given_scaling(scaling)
    raise_amax(amax, x)
    if scale is None:
        return Codes(None, None, None, None, column_sum_plain(x) if column_sum else None)
    codes = _padded(encode(x, scale, dtype))
    inverse = scale.reciprocal()
    return Codes(
        codes if rows else None,
        inverse if rows else None,
        codes.t().contiguous() if cols else None,
        inverse if cols else None,
        column_sum_plain(x) if column_sum else None,
    )


def dequantize(codes: Codes, rows: int, dtype: torch.dtype) -> Tensor:
    """The values of a matrix of so many rows, (R, C); scales are (1,), of rows or of blocks."""
    matrix, scale = codes.rows, codes.row_scale
    if matrix is None:
        matrix, scale = codes.cols, codes.col_scale
    assert matrix is not None
    assert scale is not None
    values = matrix.to(torch.float32)
    if scale.dim() == 1:
        values *= scale[:, None]
    elif codes.rows is None and codes.has_square_cols:
        squares = values.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        squares.mul_(scale[:, : values.shape[1] // BLOCK, None].unsqueeze(1))
    else:
        values.unflatten(1, (-1, BLOCK)).mul_(scale.t().unsqueeze(2))
    if codes.rows is None:
        values = values.t()
    return values[:rows].to(dtype).contiguous()


def _without_padding(codes: Tensor, rows: int) -> Tensor:
    """``codes`` with 0 in padding, also where a scale is NaN."""
    codes.view(torch.uint8)[rows:].zero_()
    return codes


def column_sum_plain(x: Tensor) -> Tensor:
    """``x`` summed over the rows, in fp32 or wider, and rounded to its dtype."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def by_blocks_plain(
    x: Tensor, scaling: BlockScaling, rows: bool, cols: bool, column_sum: bool
) -> Codes:
    """As ``quantize.quantize`` in blocks."""
    dtype, power_of_two, square_cols = scaling
    values = _padded(x.to(torch.float32))
    row_codes = row_scale = col_codes = col_scale = None
    if rows:
        blocks = values.unflatten(1, (-1, BLOCK))  # (Rp, C/128, 128)
        s = scale_for(blocks.abs().amax(2), dtype, power_of_two)
        row_codes = encode(blocks, s.unsqueeze(2), dtype).flatten(1)
        row_scale = s.reciprocal().t().contiguous()
    if cols and square_cols:
        squares = by_squares_plain(x, dtype, False, True, power_of_two)
        col_codes, col_scale = squares.cols, squares.col_scale
    elif cols:
        blocks = values.unflatten(0, (-1, BLOCK))  # (Rp/128, 128, C)
        s = scale_for(blocks.abs().amax(1), dtype, power_of_two)
        codes = encode(blocks, s.unsqueeze(1), dtype).flatten(0, 1)
        col_codes = _without_padding(codes, x.shape[0]).t().contiguous()
        col_scale = s.reciprocal()
    sums = column_sum_plain(x) if column_sum else None
    return Codes(row_codes, row_scale, col_codes, col_scale, sums)


def quantize_plain(
    x: Tensor, scaling: Scaling, rows: bool, cols: bool, column_sum: bool = False
) -> Codes:
    """Codes of a matrix as ``scaling`` says; amax is raised."""
    if isinstance(scaling, BlockScaling):
        return by_blocks_plain(x, scaling, rows, cols, column_sum)
    return by_tensor_plain(x, scaling, rows, cols, column_sum)


def by_squares_plain(
    x: Tensor, dtype: torch.dtype, rows: bool, cols: bool, power_of_two: bool
) -> Codes:
    """As ``quantize.quantize_by_squares``."""
    values = _padded(x.to(torch.float32))
    squares = values.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # (·, 128, ·, 128)
    s = scale_for(squares.abs().amax((1, 3)), dtype, power_of_two)
    codes = encode(squares, s[:, None, :, None], dtype).flatten(2).flatten(0, 1)
    codes = _without_padding(codes, x.shape[0])
    inverse = s.reciprocal()
    return Codes(
        codes if rows else None,
        in_fours(inverse) if rows else None,
        codes.t().contiguous() if cols else None,
        in_fours(inverse.t()) if cols else None,
        None,
    )


def in_fours(scales: Tensor) -> Tensor:
    """A copy with columns of ones up to a multiple of 4.

    GEMMs look at the strides, also at that of a single row, which ``contiguous`` may leave.
    """
    padded = pad(scales, (0, -scales.shape[1] % 4), value=1.0)
    return padded.clone(memory_format=torch.contiguous_format)


def transpose_plain(codes: Tensor) -> Tensor:
    """The transpose of fp8 codes (R, C): (C, R), contiguous. Moves two bytes per element."""
    return codes.t().contiguous()

"""MXFP8 and NVFP4 in plain torch. Dimensions and layouts as in ``opfuser.kernels.microscaling``.

Codes and scales are those of the kernels, bit for bit; only the sign of a NaN is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .groups_plain import Grouped, PaddedRows, gathered, padded_rows
from .philox import philox
from .quantize_plain import BLOCK, Codes, column_sum_plain, encode, largest

FP4 = torch.float4_e2m1fn_x2
E8M0 = torch.float8_e8m0fnu
MXFP8_BLOCK = 32
NVFP4_BLOCK = 16

# The scale of a tensor takes this many bytes behind those of its blocks.
TAIL = 4

_TOP, _TOP_SCALE = 6.0, 448.0
_HUGE = torch.finfo(torch.float32).max
_SIXTH = 0.1666666716337204  # rounded to fp32
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Bit n: whether row n of 16 changes its sign before the Hadamard transform. Any will do, if both
# operands of a GEMM have the same; these are Transformer Engine's.
TRANSFORM = 0xD7E8


def swizzled(scales: Tensor, padding: int) -> Tensor:
    """One byte for each row and block, (M, S), in the order in which GEMMs read them; flat.

    Tiles of 128 rows and 4 blocks follow one another along the blocks; the scale of row r and block
    s of a tile is at ``16 (r % 32) + 4 (r // 32) + s``: NVIDIA, cuBLAS, "1D block scaling factors
    layout". Tiles are filled up with ``padding``.
    """
    rows, blocks = scales.shape
    full = pad(scales, (0, -blocks % 4, 0, -rows % BLOCK), value=padding)
    tiles = full.view(full.shape[0] // BLOCK, 4, 32, full.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def decode_plain(codes: Tensor, scale: Tensor) -> Tensor:
    """Values of codes in bf16, (M, K), of NVFP4 without the scale of the tensor.

    They are exact but for those below 2^-126: codes have at most 4 significant bits, and so have
    the scales of their blocks, if these are no powers of two.

    Args:
        codes: (M, K), or (M, K/2) of NVFP4; by rows or by columns.
        scale: of them.
    """
    values = values_of(codes) if codes.dtype == FP4 else codes.float()
    rows, features = values.shape
    block = MXFP8_BLOCK if scale.dtype == E8M0 else NVFP4_BLOCK
    down, across = -(-rows // BLOCK), -(-features // (4 * block))
    tiles = scale[: down * across * 4 * BLOCK].view(torch.uint8).view(down, across, 32, 4, 4)
    linear = tiles.permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 2)[:rows, : features // block]
    factors = linear.contiguous().view(scale.dtype).float()
    values.unflatten(1, (-1, block)).mul_(factors.unsqueeze(2))
    return values.to(torch.bfloat16)


def scales_of_columns(scale: Tensor, shape: tuple[int, int], columns: int) -> Tensor:
    """The scales of the first columns of a matrix (M, K) in NVFP4, as those of one of its own."""
    per_tile = 4 * NVFP4_BLOCK
    tiles = scale[:-TAIL].view(-1, -(-shape[1] // per_tile), 4 * BLOCK)
    part = tiles[:, : -(-columns // per_tile)].reshape(-1)
    both = part.view(torch.uint8), scale[-TAIL:].view(torch.uint8)
    return torch.cat(both).view(scale.dtype)


def tensor_scale(codes: Tensor, scale: Tensor) -> Tensor:
    """What block scales of NVFP4 are multiples of, in fp32: (1,), or (G,), one for each group."""
    (rows, pairs), packed = codes.shape, 4 * NVFP4_BLOCK // 2
    tiles = -(-rows // BLOCK) * -(-pairs // packed)
    return scale[tiles * 4 * BLOCK :].view(torch.float32)


def values_of(codes: Tensor) -> Tensor:
    """What codes of E2M1 stand for, (M, K) in fp32, of codes (M, K/2)."""
    packed = codes.view(torch.uint8)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(1).int()
    exponent, mantissa = (nibbles >> 1) & 3, nibbles & 1
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa << exponent) >> 1)
    return halves.float() * (0.5 - ((nibbles >> 3) & 1).float())


def _exponents(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """E8M0 of the least power of two with ``amax / 2^k <= largest``; 1 of 0, NaN if not finite.

    448 and 57344 are 1.75 times a power of two: what has a larger mantissa takes one more.
    """
    top = 15 if dtype == torch.float8_e5m2 else 8
    assert largest(dtype) == 1.75 * 2.0**top
    bits = amax.view(torch.int32)
    exponents = ((bits + 0x1FFFFF) >> 23) - top
    exponents = exponents.clamp_(min=0).masked_fill_(bits == 0, 127)
    return exponents.masked_fill_(amax.isfinite().logical_not_(), 255)


def _power(exponents: Tensor) -> Tensor:
    """The inverse of powers of two in E8M0, in fp32."""
    power = ((254 - exponents) << 23).view(torch.float32)
    return torch.where(exponents == 255, float("nan"), power)


def _laid_out(x: Tensor, groups: Grouped | None) -> PaddedRows:
    groups = groups or Grouped(1)
    return padded_rows(gathered(x, groups), groups)


def _by_rows(laid: PaddedRows, groups: Grouped | None, *padded: Tensor) -> Sequence[Tensor]:
    """What codes by rows have of padded rows: of groups no padding."""
    return [t[laid.at] for t in padded] if groups else padded


def _mxfp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix (M, K), by its rows."""
    blocks = values.unflatten(1, (-1, MXFP8_BLOCK))
    exponents = _exponents(blocks.abs().amax(2), dtype)
    codes = encode(blocks, _power(exponents).unsqueeze(2), dtype).flatten(1)
    return codes, exponents.to(torch.uint8)


def mxfp8_plain(
    x: Tensor,
    dtype: torch.dtype,
    rows: bool,
    cols: bool,
    column_sum: bool,
    groups: Grouped | None = None,
) -> Codes:
    """As ``microscaling.quantize_mxfp8``."""
    laid = _laid_out(x, groups)
    made = Codes(None, None, None, None, column_sum_plain(x) if column_sum else None)
    if rows:
        codes, scales = _mxfp8(laid.values, dtype)
        codes, scales = _by_rows(laid, groups, codes.view(torch.uint8), scales)
        made = made._replace(rows=codes.view(dtype), row_scale=swizzled(scales, 127).view(E8M0))
    if cols:
        codes, scales = _mxfp8(laid.values.t().contiguous(), dtype)
        codes.view(torch.uint8).masked_fill_(~laid.own, 0)
        made = made._replace(cols=codes, col_scale=swizzled(scales, 127).view(E8M0))
    return made


def fp4_codes(v: Tensor) -> Tensor:
    """E2M1 of fp32 values in the lower bits of uint8, to nearest even; 6 of NaN, as GPUs do."""
    size = v.abs()
    codes = torch.zeros_like(v, dtype=torch.uint8)
    # A tie goes to the even code: up from 0.75, 1.75 and 3.5. Negated, so that NaN passes all.
    for n, (low, high) in enumerate(pairwise(_FP4_VALUES)):
        tie = (low + high) / 2
        codes += (size < tie if n % 2 else size <= tie).logical_not_()
    negative = torch.signbit(v).logical_and_(v.isnan().logical_not_())
    return codes + 8 * negative.to(torch.uint8)


def dithered(v: Tensor, bits: Tensor) -> Tensor:
    """Values of E2M1 next to v: the further one from 0 as often as v is near to it.

    Args:
        v: in fp32.
        bits: random ones, 16 of them, as integers.
    """
    size = v.abs().clamp_(max=_TOP)
    steps = torch.full_like(size, 0.5)  # per unit
    steps.masked_fill_(size < 4, 1.0).masked_fill_(size < 2, 2.0)
    number = torch.floor(size * steps + (bits.float() + 0.5) * 2.0**-16)
    return torch.copysign(number / steps, v)


def transformed(x: Tensor) -> Tensor:
    """Every 16 rows times an orthogonal matrix: a Hadamard matrix with signs.

    Row n of 16 is multiplied by -1 if bit n of :data:`TRANSFORM` is set; then follow the steps of a
    fast Walsh-Hadamard transform between rows that are 1, 2, 8 and 4 apart, and a division by 4.
    """
    rows = torch.arange(16, device=x.device)[:, None]
    y: Tensor = x.unflatten(0, (-1, 16)) * (1 - 2 * (TRANSFORM >> rows & 1))
    for apart in (1, 2, 8, 4):
        pairs = y.unflatten(1, (-1, 2, apart))
        a, b = pairs.unbind(2)
        y = torch.stack((a + b, a - b), 2).flatten(1, 3)
    return y.flatten(0, 1) * 0.25


def _encoding(amax: Tensor) -> Tensor:
    """1 / g, (1,): 1 of amax 0, at most the largest finite value, NaN if amax is not finite."""
    top = torch.scalar_tensor(_TOP * _TOP_SCALE, dtype=torch.float32, device=amax.device)
    s = (top / amax).clamp_(max=_HUGE).masked_fill_(amax == 0, 1.0)
    return s.masked_fill_(amax.isfinite().logical_not_(), float("nan"))


def _nvfp4(
    values: Tensor, inverse: Tensor, squares: bool, bits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix (M, K), by its rows.

    Args:
        values: (M, K), or its transpose's.
        inverse: 1 / g; one, of rows (M, 1) or of blocks (S,).
        squares: whether 16 rows share the scales of their blocks.
        bits: for stochastic rounding.
    """
    blocks = values.unflatten(1, (-1, NVFP4_BLOCK))  # (M, S, 16)
    amax = blocks.abs().amax(2)
    if squares:
        amax = _in_sixteens(amax)
    sixth = torch.where(amax == 0, 0.0, inverse * _SIXTH)  # 0 of zeros, whatever g is
    scales = encode(amax, sixth, torch.float8_e4m3fn)
    d = scales.float()
    factor = torch.where(d == 0, 0.0, (inverse / d).clamp_(max=_HUGE))
    factor.masked_fill_(inverse.isnan(), float("nan"))
    scaled = (blocks * factor.unsqueeze(2)).flatten(1)
    if bits is not None:
        scaled = dithered(scaled, bits)
    return fp4_codes(scaled), scales.view(torch.uint8)


def _in_sixteens(amax: Tensor) -> Tensor:
    """The largest of every 16 rows, for each of them."""
    groups: Tensor = amax.unflatten(0, (-1, 16)).amax(1)
    return groups.repeat_interleave(16, 0)


def _packed(codes: Tensor) -> Tensor:
    """Two codes in a byte, the first one in its lower half."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()


def _with_tensor_scales(scales: Tensor, inverse: Tensor) -> Tensor:
    """Scales as GEMMs read them, and behind them g."""
    both = swizzled(scales, 0), inverse.reciprocal().view(torch.uint8)
    return torch.cat(both).view(torch.float8_e4m3fn)


def nvfp4_plain(
    x: Tensor,
    amax: Tensor,
    rows: bool,
    cols: bool,
    squares: bool,
    transform: bool,
    seed: Tensor | None,
    column_sum: bool,
    groups: Grouped | None = None,
) -> Codes:
    """As ``microscaling.quantize_nvfp4``."""
    laid = _laid_out(x, groups)
    values, own, group, _ = laid
    inverse = _encoding(amax)
    words = None if seed is None else _random_words(values, seed)
    made = Codes(None, None, None, None, column_sum_plain(x) if column_sum else None)
    if rows:
        bits = None if words is None else words >> 16
        each = inverse if inverse.numel() == 1 else inverse[group, None]
        codes, scales = _nvfp4(values, each, squares, bits)
        codes.masked_fill_(~own[:, None], 0)  # also where a scale is NaN
        codes, scales = _by_rows(laid, groups, _packed(codes), scales)
        scale = _with_tensor_scales(scales, inverse)
        made = made._replace(rows=codes.view(FP4), row_scale=scale)
    if cols:
        if transform:
            values, inverse = transformed(values), inverse * 0.25
            own = own.unflatten(0, (-1, 16)).any(1).repeat_interleave(16)
        bits = None if words is None else (words & 0xFFFF).t()
        each = inverse if inverse.numel() == 1 else inverse[group[::NVFP4_BLOCK]]
        codes, scales = _nvfp4(values.t().contiguous(), each, squares, bits)
        codes.masked_fill_(~own, 0)
        scale = _with_tensor_scales(scales, inverse)
        made = made._replace(cols=_packed(codes).view(FP4), col_scale=scale)
    return made


def _random_words(values: Tensor, seed: Tensor) -> Tensor:
    """For each element 32 random bits: row 4t + i, column c has word i of Philox at (c, t)."""
    rows, features = values.shape
    c0 = torch.arange(features, device=values.device)[None, :]
    c1 = torch.arange(rows // 4, device=values.device)[:, None]
    return torch.stack(philox(seed, c0, c1), 1).flatten(0, 1)

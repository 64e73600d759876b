"""What codes of fp8 have to be, from the definition of the formats, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.quantize import Codes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [E4M3, E5M2]
TOP = {E4M3: 448.0, E5M2: 57344.0}
NAN_CODE = 0x7F


def values(dtype: torch.dtype) -> list[float]:
    """Of the codes from 0 up to that of the largest finite value."""
    bits, bias, count = (3, 7, 0x7F) if dtype == E4M3 else (2, 15, 0x7C)
    made = []
    for code in range(count):
        exponent, mantissa = code >> bits, code & ((1 << bits) - 1)
        fraction = mantissa / (1 << bits)
        made.append((fraction + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias))
    assert made[-1] == TOP[dtype]
    return made


def expected(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Codes (uint8) of ``x s``, a product that fp32 rounds; NaN has that of its positive one."""
    product = (x.cpu().double() * torch.as_tensor(scale).cpu().double()).float().double()
    grid = torch.tensor(values(dtype), dtype=torch.float64)
    size = product.abs().nan_to_num(nan=0.0, posinf=TOP[dtype]).clamp_max(TOP[dtype]).contiguous()
    above = torch.searchsorted(grid, size).clamp_max(len(grid) - 1)
    below = (above - 1).clamp_min(0)
    up, down = grid[above] - size, size - grid[below]
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    nearest = torch.where(up == 0, above, nearest) + torch.signbit(product) * 0x80
    return torch.where(product.isnan(), NAN_CODE, nearest).to(torch.uint8)


def assert_codes(got: Tensor, want: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """Equal bits, but for the sign of a NaN; contiguous."""
    assert (got.dtype, got.shape) == (dtype, want.shape), f"{what}: {got.dtype} {got.shape}"
    assert got.is_contiguous(), f"{what}: strides {got.stride()}"
    bits = got.cpu().view(torch.uint8)
    bits = torch.where(got.cpu().float().isnan(), NAN_CODE, bits)
    wrong = (bits != want).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {want.numel()} codes are wrong, as at {wrong[0].tolist()}:"
        f" {bits[tuple(wrong[0])]:#x} instead of {want[tuple(wrong[0])]:#x}"
    )


def bits(codes: Tensor) -> Tensor:
    """Those of codes, on the CPU, with one NaN."""
    codes = codes.cpu()
    return torch.where(codes.float().isnan(), NAN_CODE, codes.view(torch.uint8))


def is_wanted(made: Codes, rows: bool, cols: bool, column_sum: bool = False) -> None:
    """Asserts that these layouts are there, with their scales, and no others."""
    assert [t is not None for t in made] == [rows, rows, cols, cols, column_sum]


def padded(x: Tensor) -> Tensor:
    """With rows of zeros up to a multiple of 128."""
    return torch.cat((x, x.new_zeros(-x.shape[0] % 128, x.shape[1])))


def assert_scales(got: Tensor, want: Tensor, what: str = "") -> None:
    """Equal, NaN too; fp32 and contiguous."""
    assert (got.dtype, got.shape) == (torch.float32, want.shape), f"{what}: {got.shape}"
    assert got.is_contiguous(), f"{what}: strides {got.stride()}"
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True, msg=what or None)


def expected_scale(amax: float, dtype: torch.dtype, power_of_two: bool) -> float:
    """s by the definition; a power of two is the largest one that is not above it."""
    size = torch.tensor(amax, dtype=torch.float32).double()
    if not size.isfinite():
        return float("nan")
    exact = TOP[dtype] / size if size else torch.ones_like(size)
    s = min(exact.float().item(), torch.finfo(torch.float32).max)
    if power_of_two:
        mantissa, _ = torch.frexp(torch.tensor(s, dtype=torch.float64))
        s = s / (2 * mantissa.item())
    return s


def inverse(scales: Tensor) -> Tensor:
    """``1 / s`` in fp32: the quotient of two fp32 numbers is rounded once by way of float64."""
    return (1.0 / scales.double()).float()


def assert_blocks(x: Tensor, made: Codes, dtype: torch.dtype, power_of_two: bool) -> None:
    """Codes and scales of blocks of 128, a block at a time."""
    values_ = padded(x.cpu().float())
    for what, codes, scales, matrix in (
        ("rows", made.rows, made.row_scale, values_),
        ("cols", made.cols, made.col_scale, values_.t()),
    ):
        if codes is None:
            continue
        blocks = matrix.unflatten(1, (-1, 128))
        want = torch.tensor(
            [
                [expected_scale(blocks[n, b].abs().max().item(), dtype, power_of_two)
                 for n in range(blocks.shape[0])]
                for b in range(blocks.shape[1])
            ]
        )  # fmt: skip
        assert_scales(scales, inverse(want), what)
        bits = expected(blocks, want.t().unsqueeze(2), dtype).flatten(1)
        (bits if what == "rows" else bits.t())[x.shape[0] :] = 0
        assert_codes(codes, bits, dtype, what)


def uneven(
    rows: int, cols: int, dtype: torch.dtype, device: torch.device, layout: str = "contiguous"
) -> Tensor:
    """Rows and columns of various sizes, so that no two blocks have one scale."""
    x = torch.randn(rows, cols) * torch.randn(rows, 1).exp() * torch.randn(cols).exp()
    x = x.to(device, dtype)
    if layout == "rows apart":
        return torch.cat((x, torch.full_like(x, float("nan"))), 1)[:, :cols]
    return x.t().contiguous().t() if layout == "columns apart" else x

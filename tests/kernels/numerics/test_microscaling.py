"""MXFP8 and NVFP4 against their definitions, value by value, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.kernels.groups import Grouped, group_ends
from opfuser.kernels.microscaling import decode, quantize_mxfp8, quantize_nvfp4
from opfuser.kernels.microscaling_plain import (
    E8M0,
    FP4,
    TAIL,
    TRANSFORM,
    mxfp8_plain,
    nvfp4_plain,
    swizzled,
    tensor_scale,
    values_of,
)
from opfuser.kernels.quantize import Codes, amax_of
from tests.kernels.activations import LAYOUTS, tensor
from tests.kernels.codes import (
    E4M3,
    E5M2,
    NAN_CODE,
    TOP,
    assert_codes,
    assert_scales,
    expected,
    is_wanted,
    padded,
    uneven,
)
from tests.kernels.numerics.test_groups import bounds

INF, NAN = math.inf, math.nan
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
HUGE = torch.finfo(torch.float32).max

# A GPU is silent about overflow and infinities; the interpreter's numpy is not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def places(rows: int, blocks: int) -> Tensor:
    """Where cuBLAS reads scales: tiles of 128 rows and 4 blocks, of 512 bytes, by rows."""
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    at = 512 * (row // 128 * -(-blocks // 4) + block // 4)
    return at + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def linear(scales: Tensor, rows: int, blocks: int, padding: int) -> Tensor:
    """Bytes of scales by row and block; what fills tiles up is ``padding``."""
    bytes_, at = scales.cpu().view(torch.uint8), places(rows, blocks)
    assert len(bytes_) == -(-rows // 128) * -(-blocks // 4) * 512
    rest = torch.ones(len(bytes_), dtype=torch.bool)
    rest[at] = False
    assert rest.sum() == len(bytes_) - rows * blocks
    assert (bytes_[rest] == padding).all()
    return bytes_[at]


def layouts(x: Tensor, made: Codes) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Of each layout its name, codes, scales, and the values that it quantizes."""
    values = padded(x.cpu().float())
    pairs = ("rows", made.rows, made.row_scale, values), (
        "cols", made.cols, made.col_scale, values.t(),
    )  # fmt: skip
    return [(name, codes, scales, v) for name, codes, scales, v in pairs if codes is not None]


def in_padding(name: str, shape: torch.Size, rows: int) -> Tensor:
    """Where codes of padding are."""
    mask = torch.zeros(shape, dtype=torch.bool)
    (mask if name == "rows" else mask.t())[rows:] = True
    return mask


def exponents(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """E8M0 of the least 2^k that brings amax below the largest value, in exact arithmetic."""
    k = torch.full(amax.shape, -127.0, dtype=torch.float64)
    while (above := amax.isfinite() & (amax.double() > TOP[dtype] * torch.exp2(k))).any():
        k += above
    codes = torch.where(amax == 0, 127, k.long() + 127)
    return torch.where(amax.isfinite(), codes, 255)


def check_mxfp8(x: Tensor, made: Codes, dtype: torch.dtype) -> None:
    for name, codes, scales, values in layouts(x, made):
        assert scales.dtype == E8M0
        blocks = values.unflatten(1, (-1, 32))
        want = exponents(blocks.abs().amax(2), dtype)
        found = linear(scales, *want.shape, 127)
        assert torch.equal(found, want.to(torch.uint8)), name
        power = torch.where(want == 255, NAN, torch.exp2(127.0 - want.double()))
        bits = expected(blocks, power.unsqueeze(2), dtype).flatten(1)
        bits[in_padding(name, bits.shape, x.shape[0])] = 0
        assert_codes(codes, bits, dtype, name)


def nearest(v: Tensor) -> Tensor:
    """Codes of E2M1 by distance; a tie goes to the even one, NaN to 6."""
    grid = torch.tensor(GRID, dtype=torch.float64)
    size = v.double().abs().clamp(max=6.0)
    away = (size.unsqueeze(-1) - grid).abs()
    least = away.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    codes = torch.where(away == least, torch.where(even, 0, 1), 2).argmin(-1)
    return torch.where(v.isnan(), 7, codes + 8 * torch.signbit(v)).to(torch.uint8)


def fp32(v: float) -> float:
    return torch.tensor(v, dtype=torch.float64).float().item()


def nvfp4_scales(amaxes: Tensor, amax: float) -> tuple[Tensor, Tensor, float]:
    """Bytes of scales of blocks, what values are multiplied by, and g, as fp32 rounds them."""
    inverse = NAN if not math.isfinite(amax) else 1.0
    if math.isfinite(amax) and amax:
        inverse = fp32(min(2688.0 / amax, HUGE))
    bytes_ = expected(amaxes, fp32(inverse * fp32(1 / 6)), E4M3)
    bytes_[amaxes == 0] = 0
    d = bytes_.view(E4M3).double()
    factor = (inverse / d).clamp(max=HUGE).float()
    factor = torch.where(d == 0, 0.0 if inverse == inverse else NAN, factor)  # noqa: PLR0124
    return bytes_, factor, fp32(1 / inverse)


def unpacked(codes: Tensor) -> Tensor:
    bytes_ = codes.cpu().view(torch.uint8)
    return torch.stack((bytes_ & 15, bytes_ >> 4), 2).flatten(1)


def check_nvfp4(x: Tensor, made: Codes, amax: float, squares: bool = False) -> None:
    for name, codes, scales, values in layouts(x, made):
        assert (codes.dtype, scales.dtype) == (FP4, E4M3)
        assert codes.is_contiguous()
        blocks = values.unflatten(1, (-1, 16))
        amaxes = blocks.abs().amax(2)
        if squares:
            amaxes = amaxes.unflatten(0, (-1, 16)).amax(1).repeat_interleave(16, 0)
        want, factor, g = nvfp4_scales(amaxes, amax)
        found = linear(scales[:-TAIL], *want.shape, 0)
        nan = (found & NAN_CODE) == NAN_CODE
        assert torch.equal(torch.where(nan, NAN_CODE, found), want), name
        assert_scales(tensor_scale(codes.cpu(), scales.cpu()), torch.tensor([g]), name)
        bits = nearest((blocks * factor.unsqueeze(2)).flatten(1))
        bits[in_padding(name, bits.shape, x.shape[0])] = 0
        assert torch.equal(unpacked(codes), bits), name


CASES = [
    ((1, 32), torch.float32, (True, True), "contiguous"),
    ((127, 96), torch.bfloat16, (True, False), "rows apart"),
    ((128, 128), torch.bfloat16, (True, True), "contiguous"),
    ((129, 160), torch.float16, (False, True), "columns apart"),
    ((257, 64), torch.float32, (True, True), "rows apart"),
]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_scales_of_mxfp8_are_the_least_that_do_not_saturate(
    dtype: torch.dtype, device: torch.device
) -> None:
    top = torch.tensor(TOP[dtype])
    sizes = [top, top.nextafter(torch.tensor(INF)), top.nextafter(torch.tensor(0.0))]
    amax = torch.stack([s * 2.0**n for s in sizes for n in (-100, -20, -1, 0, 1, 9, 100)])
    ends = torch.tensor([0.0, -0.0, 1e-45, 1e-40, 2.0**-126, 2.0**-119, 3e38, HUGE, INF, NAN, 1.0])
    amax = torch.cat((amax, ends))
    x = torch.zeros(len(amax), 64)
    x[:, 3], x[:, 63] = amax, -amax
    x[:, 4] = amax / 3
    x = x.to(device)
    made = quantize_mxfp8(x, dtype, rows=True, cols=True)
    check_mxfp8(x, made, dtype)
    by_rows = linear(made.row_scale, 128, 2, 127)[: len(amax), 0]
    decoded = torch.exp2(by_rows.double() - 127)
    fits = amax.isfinite() & (amax > 0) & (by_rows > 0)
    assert fits.sum() > 20
    assert (amax.double() <= TOP[dtype] * decoded)[fits].all()
    assert (amax.double() > TOP[dtype] * decoded / 2)[fits].all()


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize(("shape", "source", "wanted", "layout"), CASES, ids=str)
def test_values(
    shape: tuple[int, int],
    source: torch.dtype,
    wanted: tuple[bool, bool],
    layout: str,
    squares: bool,
    device: torch.device,
) -> None:
    x = uneven(*shape, source, device, layout)
    rows, cols = wanted
    made = quantize_nvfp4(x, amax_of(x), rows=rows, cols=cols, squares=squares)
    is_wanted(made, rows, cols)
    check_nvfp4(x, made, amax_of(x).item(), squares)
    if squares and rows and cols:
        assert torch.equal(unpacked(made.rows)[: len(x)], unpacked(made.cols).t()[: len(x)])
    dtype = E5M2 if squares else E4M3
    made = quantize_mxfp8(x, dtype, rows=rows, cols=cols)
    is_wanted(made, rows, cols)
    check_mxfp8(x, made, dtype)


def test_every_value_of_e2m1_its_ties_and_their_neighbors(device: torch.device) -> None:
    grid = torch.tensor(GRID)
    ties = (grid[1:] + grid[:-1]) / 2
    inf = torch.tensor(INF)
    points = torch.cat((grid, ties, ties.nextafter(inf), ties.nextafter(-inf)))
    x = torch.zeros(32, 32)
    x[: len(points), 0], x[: len(points), 1] = points, -points
    x[:, 15::16] = 6.0  # so that scales of blocks are 448, and 1 / (g d) is 1
    made = quantize_nvfp4(x.to(device), torch.tensor([6.0], device=device), rows=True, cols=False)
    found = unpacked(made.rows)[: len(points), :2]
    assert torch.equal(found[:, 0], nearest(points))
    assert torch.equal(found[:, 1], nearest(-points))
    assert found[:8, 0].tolist() == list(range(8))
    torch.testing.assert_close(values_of(made.rows.cpu())[:8, 1], -grid, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("amax", "squares"),
    [*zip([1e-45, 1e-37, 2.0**-126, 1.0, HUGE, 0.0, INF, NAN], [False, True] * 4), (1.0, False)],
)
def test_nvfp4_of_what_is_extreme(amax: float, squares: bool, device: torch.device) -> None:
    """Blocks far below the largest one have a scale of 0, and codes 0."""
    x = torch.zeros(34, 64)
    x[33, 63] = amax
    for n in range(20):
        x[n, n] = amax * 2.0**-n
        x[n, n + 32] = -amax * 3.0**-n
    x = x.nan_to_num(nan=NAN, posinf=INF, neginf=-INF).to(device)
    made = quantize_nvfp4(x, amax_of(x), rows=True, cols=True, squares=squares)
    check_nvfp4(x, made, amax_of(x).item(), squares)


def hadamard() -> Tensor:
    """The orthogonal matrix of order 16, with the signs of its columns."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    signs = torch.tensor([-1.0 if TRANSFORM >> n & 1 else 1.0 for n in range(16)])
    return h * signs.double() / 4


@pytest.mark.parametrize("rows", [1, 16, 130])
def test_columns_are_transformed(rows: int, device: torch.device) -> None:
    """Values that fp32 adds exactly, so that one matrix product gives the same."""
    x = torch.randint(-64, 65, (rows, 96), device=device).float()
    amax = amax_of(x)
    made = quantize_nvfp4(x, amax, rows=True, cols=True, transform=True)
    groups = padded(x.cpu()).double().unflatten(0, (-1, 16))
    exact = (hadamard() @ groups).flatten(0, 1).float()
    assert exact.abs().max() <= 4 * amax.cpu()
    check_nvfp4(x, made._replace(cols=None, col_scale=None), amax.item())
    used = -(-rows // 16) * 16
    assert not exact[used:].count_nonzero()
    check_nvfp4(exact[:used], Codes(None, None, made.cols, made.col_scale, None), 4 * amax.item())


ROUTINGS = [5, 0, 130, 1], [128, 256, 7], [0, 0, 33], [0, 0]
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8": {},
    "nvfp4": {"amax": None},
    "nvfp4, squares": {"amax": None, "squares": True},
    "nvfp4, transformed": {"amax": None, "transform": True},
    "nvfp4, at random": {"amax": None, "transform": True, "seed": True},
}


def of_groups(
    x: Tensor, name: str, *, plain: bool = False, amax: Tensor | None = None, **how: Any
) -> Codes:
    """Both layouts of x in a format, by the kernel, or in plain torch."""
    own = FORMATS[name]
    if "amax" not in own:
        if plain:
            return mxfp8_plain(x, E4M3, True, True, False, **how)
        return quantize_mxfp8(x, E4M3, rows=True, cols=True, **how)
    amax = amax_of(x) if amax is None else amax
    seed = torch.tensor([2**40 + 3], device=x.device) if "seed" in own else None
    squares, transform = own.get("squares", False), own.get("transform", False)
    if plain:
        return nvfp4_plain(x, amax, True, True, squares, transform, seed, False, **how)
    how |= {"squares": squares, "transform": transform, "seed": seed}
    return quantize_nvfp4(x, amax, rows=True, cols=True, **how)


def bytes_of(codes: Tensor) -> Tensor:
    """Without the sign of zeros: a transform makes -0 of rows that are not there."""
    found = unpacked(codes) if codes.dtype == FP4 else codes.cpu().view(torch.uint8)
    return torch.where(found == 8, 0, found) if codes.dtype == FP4 else found


def by_block(codes: Tensor, scale: Tensor) -> Tensor:
    """Bytes of scales by row and block, of as many rows as there are codes."""
    blocks = codes.shape[1] // (8 if codes.dtype == FP4 else 32)
    return scale.cpu().view(torch.uint8)[places(codes.shape[0], blocks)]


def assert_part(
    got: tuple[Tensor, Tensor], rows: slice, columns: slice, want: tuple[Tensor, Tensor]
) -> None:
    """Codes and scales of a part of a matrix are the first ones of another."""
    block = 16 if got[0].dtype == FP4 else 32
    blocks = slice(columns.start // block, columns.stop // block)
    for own, other in (
        (bytes_of(got[0])[rows, columns], bytes_of(want[0])),
        (by_block(*got)[rows, blocks], by_block(*want)),
    ):
        assert torch.equal(own, other[: own.shape[0], : own.shape[1]])


@pytest.mark.parametrize("sizes", ROUTINGS, ids=str)
@pytest.mark.parametrize(("name", "features"), [*zip(FORMATS, (160, 96, 32, 160, 128))])
def test_groups_are_quantized_as_if_each_were_alone(
    name: str, features: int, sizes: list[int], device: torch.device
) -> None:
    """No block spans two, and nobody's rows behind the last have a part in any."""
    rows, whole = sum(sizes), slice(0, features)
    x = uneven(rows + 9, features, torch.bfloat16, device)
    amax = amax_of(x[:rows])
    x[rows:] = NAN
    grouped = Grouped(len(sizes), group_ends(torch.tensor(sizes, device=device), len(x)))
    made = of_groups(x, name, amax=amax, groups=grouped)
    by_rows, by_cols = (made.rows, made.row_scale), (made.cols, made.col_scale)
    assert made.rows.shape[0] == len(x)
    for own, at in bounds(sizes):
        if "random" in name:
            continue  # random numbers are those of where a row is with padding
        alone = of_groups(x[own], name, amax=amax)
        filled = slice(at.start, at.start + -(-(own.stop - own.start) // 128) * 128)
        assert_part(by_rows, own, whole, (alone.rows, alone.row_scale))
        assert_part(by_cols, whole, filled, (alone.cols, alone.col_scale))
    twin = of_groups(x, name, plain=True, amax=amax, groups=grouped)
    assert [t.shape for t in made[2:4]] == [t.shape for t in twin[2:4]]
    assert_part(by_rows, slice(0, rows), whole, (twin.rows, twin.row_scale))
    used = slice(0, bounds(sizes)[-1][1].stop)
    assert_part(by_cols, whole, used, (twin.cols, twin.col_scale))


@pytest.mark.parametrize("rows", [32, 128, 160])
@pytest.mark.parametrize("name", FORMATS)
def test_matrices_of_one_size_have_scales_of_their_own(
    name: str, rows: int, device: torch.device
) -> None:
    """Weights of all groups, one below the other."""
    count, features = 3, 96
    x = uneven(count * rows, features, torch.bfloat16, device)
    amax = x.float().abs().view(count, -1).amax(1)
    made = of_groups(x, name, amax=amax, groups=Grouped(count))
    twin = of_groups(x, name, plain=True, amax=amax, groups=Grouped(count))
    for own, other in zip(made[:4:2], twin[:4:2], strict=True):
        assert torch.equal(bytes_of(own), bytes_of(other))
    padded_rows, whole = -(-rows // 128) * 128, slice(0, features)
    assert bytes_of(made.cols).shape[1] == count * padded_rows
    alone = [of_groups(part, name) for part in x.split(rows)]
    for g, one in enumerate(alone):
        if "random" in name:
            continue
        own, at = slice(g * rows, (g + 1) * rows), slice(g * padded_rows, (g + 1) * padded_rows)
        assert_part((made.rows, made.row_scale), own, whole, (one.rows, one.row_scale))
        assert_part((made.cols, made.col_scale), whole, at, (one.cols, one.col_scale))
    if name != "mxfp8":
        want = torch.cat([tensor_scale(one.rows, one.row_scale) for one in alone])
        assert tensor_scale(made.rows, made.row_scale).tolist() == want.tolist()
        want = torch.cat([tensor_scale(one.cols, one.col_scale) for one in alone])
        assert tensor_scale(made.cols, made.col_scale).tolist() == want.tolist()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, FP4], ids=str)
def test_values_of_every_code(dtype: torch.dtype, device: torch.device) -> None:
    """By the definition of the formats, exactly; with scales from end to end."""
    small = dtype == FP4
    steps = torch.arange(80 if small else 224) + 32 * torch.arange(40)[:, None]
    patterns = (steps % 256).to(torch.uint8)
    codes = patterns.to(device).view(dtype)
    values = values_of_bytes(patterns) if small else patterns.view(dtype).double()
    blocks = values.shape[1] // (16 if small else 32)
    bytes_ = torch.randint(0, 127 if small else 255, (40, blocks), dtype=torch.uint8)
    bytes_[0], bytes_[1, 0] = 0, 0x7F if small else 0xFF
    scale = torch.cat((swizzled(bytes_, 0), torch.zeros(TAIL if small else 0, dtype=torch.uint8)))
    scale = scale.to(device).view(E4M3 if small else E8M0)
    got = decode(codes, scale)
    assert (got.dtype, got.shape) == (torch.bfloat16, values.shape)
    factors = bytes_.view(E4M3).double() if small else torch.exp2(bytes_.double() - 127)
    if not small:
        factors[1, 0] = NAN
    want = values * factors.repeat_interleave(16 if small else 32, 1)
    # What bf16 has a number for; below that it is rounded, and above no code of a value is.
    fits = ((want.abs() >= 2.0**-126) & (want.abs() < 2.0**128)) | (want == 0) | want.isnan()
    assert fits.double().mean() > 0.8
    got = got.cpu().double()
    torch.testing.assert_close(got[fits], want[fits], rtol=0, atol=0, equal_nan=True)
    tiny = want.abs() < 2.0**-126
    torch.testing.assert_close(got[tiny], want[tiny], rtol=0, atol=2.0**-133)


def values_of_bytes(packed: Tensor) -> Tensor:
    nibbles = unpacked(packed).long()
    return torch.tensor(GRID, dtype=torch.float64)[nibbles & 7] * (1 - 2 * (nibbles >> 3))


def test_a_transform_leaves_products_as_they_are() -> None:
    h = hadamard()
    torch.testing.assert_close(h @ h.t(), torch.eye(16, dtype=torch.float64))


def test_stochastic_rounding_is_right_on_average(device: torch.device) -> None:
    """Between neighbors of the grid, and by 2^-17 of their distance for each random number."""
    x = torch.linspace(-6, 6, 64).repeat(512, 1)
    x[:, ::16] = 6.0  # so that scales of blocks are 448, and 1 / (g d) is 1
    seed = torch.tensor([2**62 + 5], device=device)
    amax = torch.full((1,), 6.0, device=device)
    made = quantize_nvfp4(x.to(device), amax, rows=True, cols=False, seed=seed)
    got = values_of(made.rows.cpu()).double()
    grid = torch.tensor(sorted({-v for v in GRID} | set(GRID)), dtype=torch.float64)
    above = grid[torch.searchsorted(grid, x[0].double().contiguous()).clamp(max=len(grid) - 1)]
    step = torch.where(x[0].abs() < 2, 0.5, torch.where(x[0].abs() < 4, 1.0, 2.0)).double()
    assert ((got - x.double()).abs() < step + 1e-6).all()
    assert ((got == above) | (got >= above - step)).all()
    # 5 standard deviations of a mean of 512
    assert ((got.mean(0) - x[0].double()).abs() <= 5 * step / 2 / 512**0.5 + 2**-16).all()
    exact = torch.isin(x[0].double(), grid)
    assert (got[:, exact] == x[:, exact].double()).all()
    other = quantize_nvfp4(x.to(device), amax, rows=True, cols=False, seed=seed + 1)
    same = (got == values_of(other.rows.cpu()).double()).double().mean()
    assert 0.4 < same < 0.8, "another seed, other numbers"


@pytest.mark.parametrize(
    ("transform", "shape", "dtype"),
    [
        (False, (1, 32), torch.bfloat16),
        (False, (130, 96), torch.float32),
        (True, (1, 32), torch.float32),
        (True, (130, 96), torch.bfloat16),
    ],
    ids=str,
)
def test_kernels_give_the_bits_of_plain_torch(
    transform: bool, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Also where values are rounded stochastically, and where the transform rounds."""
    x = uneven(*shape, dtype, device)
    seed, amax = torch.tensor([-(2**40) - 7], device=device), amax_of(x)
    made = quantize_nvfp4(x, amax, rows=True, cols=True, transform=transform, seed=seed)
    want = nvfp4_plain(x, amax, True, True, False, transform, seed, False)
    other = quantize_mxfp8(x, E4M3, rows=True, cols=True), mxfp8_plain(x, E4M3, True, True, False)
    for own, twin in zip((*made[:4], *other[0][:4]), (*want[:4], *other[1][:4]), strict=True):
        assert torch.equal(own.cpu().view(torch.uint8), twin.cpu().view(torch.uint8))


def test_the_default_dtype_changes_nothing(device: torch.device) -> None:
    x, seed = uneven(130, 64, torch.float32, device), torch.tensor([77], device=device)

    def codes() -> list[Tensor]:
        made = nvfp4_plain(x, amax_of(x), True, True, False, True, seed, False)
        other = mxfp8_plain(x, E4M3, True, True, False)
        found = [t.view(torch.uint8) for t in (*made[:4], *other[:4])]
        return [*found, values_of(made.rows)]

    want = codes()
    torch.set_default_dtype(torch.float64)
    try:
        got = codes()
    finally:
        torch.set_default_dtype(torch.float32)
    for own, before in zip(got, want, strict=True):
        assert (own.dtype, own.tolist()) == (before.dtype, before.tolist())


@pytest.mark.parametrize("transform", [False, True])
def test_codes_of_padding_are_0_where_nothing_is_finite(
    transform: bool, device: torch.device
) -> None:
    x = torch.full((130, 64), NAN, device=device)
    made = quantize_nvfp4(
        x, amax_of(x), rows=True, cols=True, transform=transform,
        seed=torch.zeros(1, dtype=torch.int64, device=device),
    )  # fmt: skip
    assert not unpacked(made.rows)[130:].count_nonzero()
    assert not unpacked(made.cols)[:, 144:].count_nonzero()
    assert tensor_scale(made.rows, made.row_scale).isnan().all()
    assert tensor_scale(made.cols, made.col_scale).isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout: str, device: torch.device) -> None:
    x = tensor(129, 64, dtype=torch.bfloat16, device=device, layout=layout)
    check_mxfp8(x, quantize_mxfp8(x, E4M3, rows=True, cols=True), E4M3)
    check_nvfp4(x, quantize_nvfp4(x, amax_of(x), rows=True, cols=True), amax_of(x).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_column_sums(dtype: torch.dtype, device: torch.device) -> None:
    """Within what sums in fp32 lose; the interpreter rounds bf16 toward zero."""
    x = tensor(300, 64, dtype=dtype, device=device)
    exact = x.double().sum(0)
    for made in (
        quantize_mxfp8(x, E5M2, rows=True, cols=True, column_sum=True),
        quantize_nvfp4(x, amax_of(x), rows=False, cols=True, transform=True, column_sum=True),
    ):
        assert made.column_sum.dtype == dtype
        unit = torch.finfo(dtype).eps * exact.abs()
        slack = 2**-20 * x.double().abs().sum(0).max()
        assert ((made.column_sum.double() - exact).abs() <= unit + slack).all()


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    made = quantize_mxfp8(x, E4M3, rows=True, cols=True, column_sum=True)
    assert [tuple(t.shape) for t in made] == [(0, 64), (0,), (64, 0), (0,), (64,)]
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    made = quantize_nvfp4(
        x, amax_of(x), rows=True, cols=True, transform=True, seed=seed, column_sum=True
    )
    assert [tuple(t.shape) for t in made] == [(0, 32), (TAIL,), (64, 0), (TAIL,), (64,)]
    assert tensor_scale(made.rows, made.row_scale).tolist() == [1.0]


def test_columns_that_do_not_fill_blocks_are_refused(device: torch.device) -> None:
    x = torch.ones(2, 40, device=device)
    for quantize in (
        lambda: quantize_mxfp8(x, E4M3, rows=True, cols=False),
        lambda: quantize_nvfp4(x, amax_of(x), rows=True, cols=False),
    ):
        with pytest.raises(RuntimeError, match="40"):
            quantize()

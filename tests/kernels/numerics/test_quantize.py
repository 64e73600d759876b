from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from opfuser.kernels.quantize import (
    BlockScaling,
    Codes,
    MeasuredScaling,
    TensorScaling,
    amax_of,
    largest,
    quantize,
    quantize_by_squares,
    scale_for,
    transpose_codes,
)
from tests.kernels.activations import LAYOUTS, assert_rounded_once, tensor
from tests.kernels.codes import (
    FORMATS,
    TOP,
    assert_blocks,
    assert_codes,
    assert_scales,
    expected,
    expected_scale,
    inverse,
    is_wanted,
    padded,
    uneven,
    values,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WANTED = [(True, True), (True, False), (False, True)]
INF, NAN = math.inf, math.nan

# A GPU is silent about overflow and infinities; the interpreter's numpy is not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check_by_tensor(
    x: Tensor, scale: float, dtype: torch.dtype, rows: bool = True, cols: bool = True
) -> None:
    s = torch.tensor([scale], device=x.device)
    before = x.clone()
    made = quantize(x, TensorScaling(s, dtype), rows=rows, cols=cols)
    is_wanted(made, rows, cols)
    codes = padded(expected(x, s, dtype))
    if rows:
        assert_codes(made.rows, codes, dtype, "rows")
        assert_scales(made.row_scale, inverse(s.cpu()))
    if cols:
        assert_codes(made.cols, codes.t(), dtype, "cols")
        assert_scales(made.col_scale, inverse(s.cpu()))
    assert_scales(s, torch.tensor([scale]), "the scale is only read")
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


def check_by_squares(x: Tensor, made: Codes, dtype: torch.dtype, power_of_two: bool) -> None:
    matrix = padded(x.cpu().float())
    down, across = matrix.shape[0] // 128, matrix.shape[1] // 128
    inverses, bits = torch.ones(down, across), torch.zeros_like(matrix, dtype=torch.uint8)
    for i in range(down):
        for j in range(across):
            square = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            s = expected_scale(matrix[square].abs().max().item(), dtype, power_of_two)
            inverses[i, j] = inverse(torch.tensor(s))
            bits[square] = expected(matrix[square], s, dtype)
    bits[x.shape[0] :] = 0
    for what, codes, scales, want, want_scales in (
        ("rows", made.rows, made.row_scale, bits, inverses),
        ("cols", made.cols, made.col_scale, bits.t(), inverses.t()),
    ):
        if codes is not None:
            assert_codes(codes, want, dtype, what)
            ones = torch.ones(len(want_scales), -want_scales.shape[1] % 4)
            assert_scales(scales, torch.cat((want_scales, ones), 1), what)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_value_of_a_format_has_its_own_code(dtype: torch.dtype, device: torch.device) -> None:
    sizes = torch.tensor(values(dtype))
    every = torch.stack((sizes, -sizes)).to(device)
    made = quantize(every, TensorScaling(torch.ones(1, device=device), dtype), rows=True, cols=True)
    want = torch.arange(len(sizes), dtype=torch.uint8)
    assert_codes(made.rows, padded(torch.stack((want, want + 0x80))), dtype)
    assert largest(dtype) == TOP[dtype] == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_ties_go_to_even_and_their_neighbors_do_not(
    dtype: torch.dtype, device: torch.device
) -> None:
    grid = torch.tensor(values(dtype))
    ties = (grid[1:] + grid[:-1]) / 2
    infinity = torch.tensor(INF)
    points = torch.cat((ties, ties.nextafter(infinity), ties.nextafter(-infinity)))
    x = torch.stack((points, -points)).to(device)
    check_by_tensor(x, 1.0, dtype)
    check_by_tensor(x / 64, 64.0, dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 2.0**126, 3e38, 1e-37, NAN])
def test_what_is_extreme(dtype: torch.dtype, scale: float, device: torch.device) -> None:
    top, info = TOP[dtype], torch.finfo(torch.float32)
    beyond = [top, top * 1.01, top * 1.04, top * 1.2, top * 2, 1e30, info.max, INF, NAN]
    tiny = [0.0, info.tiny, 1e-30, 2.0**-126, 2.0**126, 2.0**-10, 2.0**-18]
    x = torch.tensor([*beyond, *tiny], device=device)
    check_by_tensor(torch.stack((x, -x)), scale, dtype)


@pytest.mark.parametrize(
    ("shape", "source", "dtype", "wanted"),
    [
        ((1, 1), torch.float32, FORMATS[0], WANTED[0]),
        ((1, 33), torch.bfloat16, FORMATS[1], WANTED[1]),
        ((127, 48), torch.float16, FORMATS[0], WANTED[2]),
        ((128, 128), torch.bfloat16, FORMATS[0], WANTED[0]),
        ((128, 256), torch.float32, FORMATS[1], WANTED[1]),
        ((129, 16), torch.float32, FORMATS[1], WANTED[0]),
        ((129, 131), torch.bfloat16, FORMATS[0], WANTED[1]),
        ((130, 72), torch.bfloat16, FORMATS[1], WANTED[2]),
        ((260, 65), torch.float16, FORMATS[1], WANTED[0]),
    ],
    ids=str,
)
def test_one_scale(
    shape: tuple[int, int],
    source: torch.dtype,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
    device: torch.device,
) -> None:
    x = tensor(*shape, dtype=source, device=device)
    check_by_tensor(x, TOP[dtype] / 3.7, dtype, *wanted)


@pytest.mark.parametrize(("dtype", "power_of_two"), [(FORMATS[0], False), (FORMATS[1], True)])
@pytest.mark.parametrize("amax", [3.7, 0.0, 1e-38, 2.0**126, INF, NAN])
def test_a_scale_from_the_largest_value(
    amax: float, dtype: torch.dtype, power_of_two: bool, device: torch.device
) -> None:
    x, given = tensor(130, 72, dtype=torch.bfloat16, device=device), torch.tensor([amax])
    s = expected_scale(amax, dtype, power_of_two)
    scaling = MeasuredScaling(given.to(device), dtype, power_of_two)
    codes = padded(expected(x, s, dtype))
    for rows, cols in WANTED:
        made = quantize(x, scaling, rows=rows, cols=cols)
        is_wanted(made, rows, cols)
        for got, scale, want in (
            (made.rows, made.row_scale, codes),
            (made.cols, made.col_scale, codes.t()),
        ):
            if got is not None:
                assert_codes(got, want, dtype)
                assert_scales(scale, inverse(torch.tensor([s])))
    assert_scales(scaling.amax, given, "it is only read")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_scale_of_any_layout(layout: str, device: torch.device) -> None:
    x = tensor(129, 48, dtype=torch.bfloat16, device=device, layout=layout)
    check_by_tensor(x, 30.0, FORMATS[0])
    check_by_tensor(x, 30.0, FORMATS[0], cols=False)


@pytest.mark.parametrize(
    ("values_", "before", "after"),
    [
        ([1.0, -3.0, 2.0], 0.0, 3.0),
        ([1.0, -3.0, 2.0], 2.5, 3.0),
        ([1.0, -3.0, 2.0], 4.0, 4.0),
        ([0.0, -0.0, 0.0], 0.0, 0.0),
        ([1.0, -INF, 2.0], 4.0, INF),
        ([INF, NAN, 2.0], 4.0, NAN),
        ([-NAN, INF, 2.0], INF, NAN),
        ([1.0, -3.0, 2.0], NAN, NAN),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amax_is_raised_in_the_same_pass(
    values_: list[float], before: float, after: float, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.zeros(129, 65, dtype=dtype)
    x[(0, 127, 128), (0, 64, 3)] = torch.tensor(values_, dtype=dtype)
    amax = torch.tensor([before], device=device)
    scale = torch.ones(1, device=device)
    quantize(x.to(device), TensorScaling(scale, FORMATS[0], amax), rows=True, cols=False)
    torch.testing.assert_close(amax.cpu(), torch.tensor([after]), rtol=0, atol=0, equal_nan=True)
    own = amax_of(x.to(device)).cpu()
    want = x.float().abs().amax().view(1)
    torch.testing.assert_close(own, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [5.5, -5.5, INF, NAN])
def test_amax_of_many_values(value: float, dtype: torch.dtype, device: torch.device) -> None:
    """Wherever it is: among those of several programs, and of columns that are apart."""
    x = torch.rand(3, 16385, dtype=torch.float32).to(device, dtype)
    want = torch.tensor([abs(value)])
    for row, col in ((0, 0), (1, 16383), (2, 16384)):
        held = x.clone()
        held[row, col] = value
        for layout in (held, held.t(), held.repeat_interleave(2, 1)[:, ::2]):
            torch.testing.assert_close(amax_of(layout).cpu(), want, rtol=0, atol=0, equal_nan=True)
    assert amax_of(x).item() == x.float().max().item()


def test_amax_of_no_values_is_0(device: torch.device) -> None:
    for shape in ((0, 5), (5, 0)):
        amax = amax_of(torch.empty(shape, dtype=torch.bfloat16, device=device))
        assert amax.dtype == torch.float32
        assert amax.tolist() == [0.0]


@pytest.mark.parametrize("shape", [(3, 17), (129, 48), (300, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [False, True])
def test_column_sums(
    shape: tuple[int, int], dtype: torch.dtype, blocks: bool, device: torch.device
) -> None:
    """Within what sums in fp32 lose; the interpreter rounds bf16 toward zero."""
    rows, cols = shape
    x = tensor(rows, 128 if blocks else cols, dtype=dtype, device=device)
    if blocks:
        made = quantize(x, BlockScaling(FORMATS[0]), rows=True, cols=False, column_sum=True)
        is_wanted(made, True, False, True)
    else:
        scale = torch.ones(1, device=device)
        made = quantize(x, TensorScaling(scale, FORMATS[0]), rows=False, cols=True, column_sum=True)
        is_wanted(made, False, True, True)
    assert made.column_sum.dtype == dtype
    exact = x.double().sum(0)
    terms = x.double().abs().sum(0).max()
    unit = torch.finfo(dtype).eps * exact.abs()
    assert ((made.column_sum.double() - exact).abs() <= unit + 2**-20 * terms).all()


def test_column_sums_are_rounded_once(device: torch.device) -> None:
    x = tensor(300, 48, dtype=torch.float16, device=device)
    scale = torch.ones(1, device=device)
    made = quantize(x, TensorScaling(scale, FORMATS[0]), rows=True, cols=True, column_sum=True)
    assert_rounded_once(made.column_sum, x.double().sum(0))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales(dtype: torch.dtype, power_of_two: bool, device: torch.device) -> None:
    top = TOP[dtype]
    sizes = torch.cat((torch.rand(120), torch.tensor([top, 1.0, 2.0**126, 2.0**-126, 3.0])))
    near = sizes.nextafter(torch.tensor(INF))
    special = torch.tensor([0.0, 1e-45, 1e-38, 3.4e38, INF, NAN])
    amax = torch.cat((sizes, near, special))
    want = torch.tensor([expected_scale(a, dtype, power_of_two) for a in amax.tolist()])
    got = scale_for(amax.to(device), dtype, power_of_two=power_of_two)
    assert_scales(got, want)
    assert_scales(scale_for(amax.to(device), dtype, power_of_two=power_of_two, margin=4), want / 16)
    one = scale_for(amax[:1].to(device), dtype, power_of_two=power_of_two)
    assert_scales(one, want[:1])
    # As kernels compute them: of a block with one entry that is not 0.
    entries = torch.zeros(len(amax), 128)
    entries[:, 5] = amax
    scaling = BlockScaling(dtype, power_of_two)
    (of_rows,) = quantize(entries.to(device), scaling, rows=True, cols=False).row_scale
    assert_scales(of_rows[: len(amax)], inverse(want))
    finite = got.cpu()[:-2]
    product = finite.double() * amax[:-2].double()
    assert (product <= top * (1 + 2**-24)).all()
    if power_of_two:
        assert (torch.frexp(finite)[0] == 0.5).all()
        assert (product <= top).all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    ("rows", "source", "dtype", "wanted", "layout"),
    [
        (1, torch.float32, FORMATS[0], WANTED[0], "contiguous"),
        (127, torch.bfloat16, FORMATS[0], WANTED[1], "rows apart"),
        (128, torch.bfloat16, FORMATS[1], WANTED[0], "contiguous"),
        (129, torch.float16, FORMATS[0], WANTED[2], "columns apart"),
        (129, torch.float32, FORMATS[1], WANTED[0], "rows apart"),
    ],
    ids=str,
)
def test_blocks_and_squares(
    rows: int,
    source: torch.dtype,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
    layout: str,
    power_of_two: bool,
    device: torch.device,
) -> None:
    x = uneven(rows, 256, source, device, layout)
    by_rows, by_cols = wanted
    made = quantize(x, BlockScaling(dtype, power_of_two), rows=by_rows, cols=by_cols)
    is_wanted(made, by_rows, by_cols)
    assert_blocks(x, made, dtype, power_of_two)
    assert not made.has_square_cols
    squares = quantize_by_squares(x, dtype, rows=by_rows, cols=by_cols, power_of_two=power_of_two)
    is_wanted(squares, by_rows, by_cols)
    check_by_squares(x, squares, dtype, power_of_two)
    mixed = quantize(x, BlockScaling(dtype, power_of_two, True), rows=by_rows, cols=by_cols)
    assert mixed.has_square_cols == by_cols
    for own, want in zip(mixed[:4], (*made[:2], *squares[2:4])):
        assert (own is None) == (want is None)
        if own is not None:
            assert torch.equal(own.view(torch.uint8), want.view(torch.uint8))
            assert (own.shape, own.stride()) == (want.shape, want.stride())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_of_zeros_infinities_and_extremes(
    dtype: torch.dtype, power_of_two: bool, device: torch.device
) -> None:
    x = torch.zeros(130, 128)
    for row, value in enumerate((INF, NAN, 2.0**-126, 2.0**126, -3e38, 1e-30, 449.0, -0.0)):
        x[row, row] = value
        x[row, row + 16] = value / 3
    x[129, (40, 41)] = torch.tensor([INF, NAN])  # in a block that ends with padding
    x = x.to(device)
    made = quantize(x, BlockScaling(dtype, power_of_two), rows=True, cols=True)
    assert_blocks(x, made, dtype, power_of_two)
    for square in (x, x[2:]):
        made = quantize_by_squares(square, dtype, rows=True, cols=True, power_of_two=power_of_two)
        check_by_squares(square, made, dtype, power_of_two)


@pytest.mark.parametrize("cols", [0, 16, 128])
def test_no_rows(cols: int, device: torch.device) -> None:
    x = torch.empty(0, cols, dtype=torch.bfloat16, device=device)
    amax = torch.full((1,), 2.0, device=device)
    scale = torch.full((1,), 4.0, device=device)
    made = quantize(
        x, TensorScaling(scale, FORMATS[0], amax), rows=True, cols=True, column_sum=True
    )
    assert (made.rows.shape, made.cols.shape) == ((0, cols), (cols, 0))
    assert (made.row_scale.tolist(), made.col_scale.tolist()) == ([0.25], [0.25])
    assert amax.tolist() == [2.0]
    assert made.column_sum.tolist() == [0.0] * cols
    if cols == 128:
        made = quantize(x, BlockScaling(FORMATS[0]), rows=True, cols=True, column_sum=True)
        assert [tuple(t.shape) for t in made] == [(0, 128), (1, 0), (128, 0), (0, 128), (128,)]
        assert not made.column_sum.count_nonzero()
        made = quantize_by_squares(x, FORMATS[0], rows=True, cols=True)
        assert [tuple(t.shape) for t in made[:4]] == [(0, 128), (0, 4), (128, 0), (1, 0)]


def test_blocks_refuse_columns_that_do_not_fill_them(device: torch.device) -> None:
    x = torch.ones(2, 130, device=device)
    with pytest.raises(RuntimeError, match="130"):
        quantize(x, BlockScaling(FORMATS[0]), rows=True, cols=False)
    with pytest.raises(RuntimeError, match="130"):
        quantize_by_squares(x, FORMATS[0], rows=True, cols=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(1000, 1040), (2048, 3584), (4096, 128)], ids=str)
def test_the_transpose_is_that_of_the_rows_on_a_gpu(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """An assembler may compile what is both stored and packed into words wrongly."""
    for source in DTYPES:
        x = (torch.randn(shape, device="cuda") * 3).to(source)
        s = scale_for(amax_of(x), dtype)
        made = quantize(x, TensorScaling(s, dtype), rows=True, cols=True)
        bits, want = made.rows.view(torch.uint8), padded(expected(x, s, dtype))
        assert torch.equal(bits.t(), made.cols.view(torch.uint8))
        assert torch.equal(bits.cpu(), want)
        if shape[1] % 128 == 0:
            made = quantize_by_squares(x, dtype, rows=True, cols=True)
            assert torch.equal(made.rows.view(torch.uint8).t(), made.cols.view(torch.uint8))
            check_by_squares(x, made, dtype, True)


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (48, 144), (132, 16), (4, 1), (3, 5), (130, 128), (0, 16)]
)
@pytest.mark.parametrize("dtype", FORMATS)
def test_codes_are_transposed(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    made = transpose_codes(bits.view(dtype))
    assert made.dtype == dtype
    assert made.is_contiguous()
    assert torch.equal(made.view(torch.uint8), bits.t())


def test_slices_of_codes_are_transposed(device: str) -> None:
    bits = torch.randint(0, 256, (128, 256), dtype=torch.uint8, device=device)
    made = transpose_codes(bits.view(torch.float8_e4m3fn)[:, 64:192])
    assert torch.equal(made.view(torch.uint8), bits[:, 64:192].t())

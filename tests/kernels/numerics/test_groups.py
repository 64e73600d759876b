"""Codes of groups of rows from the definition of the formats, and products against float64."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from opfuser.kernels.grouped_products import columns_by_columns, rows_by_matrices
from opfuser.kernels.groups import Grouped, VectorScaling, group_ends, quantize_groups
from opfuser.kernels.quantize import (
    BlockScaling,
    Codes,
    MeasuredScaling,
    TensorScaling,
    quantize_by_squares,
)
from tests.kernels.codes import (
    FORMATS,
    assert_scales,
    bits,
    expected,
    expected_scale,
    inverse,
    is_wanted,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E4M3, E5M2 = FORMATS
SIZES = {
    "balanced": [128, 128, 128],
    "uneven": [5, 0, 130, 1, 33],
    "skewed": [300, 2, 16],
    "one expert": [0, 0, 260, 0],
    "no rows": [0, 0],
    "one group": [7],
}
each_routing = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def each_routing_with(names: str, *values: Any) -> pytest.MarkDecorator:
    """Each routing with one of the values, the uneven one with all of them."""
    pairs = [*zip(SIZES, itertools.cycle(values)), *(("uneven", value) for value in values[2:])]
    rows = [(SIZES[name], *(v if isinstance(v, list) else [v])) for name, v in pairs]
    return pytest.mark.parametrize(f"sizes, {names}", rows, ids=[f"{n}-{v}" for n, v in pairs])


NAN = float("nan")


def matrix(
    rows: int, cols: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows and columns of various sizes, so that no two have one scale."""
    x = torch.randn(rows, cols) * torch.randn(rows, 1).exp() * torch.randn(cols).exp()
    return x.to(device, dtype)


def ends_of(sizes: list[int], device: torch.device) -> Tensor:
    return group_ends(torch.tensor(sizes, device=device), sum(sizes))


def bounds(sizes: list[int]) -> list[tuple[slice, slice]]:
    """Where each group lies, among its rows and where groups are padded."""
    stops = list(itertools.accumulate(sizes))
    padded = list(itertools.accumulate(max(1, -(-size // 128)) * 128 for size in sizes))
    return [
        (slice(a, b), slice(c, d)) for a, b, c, d in zip([0, *stops], stops, [0, *padded], padded)
    ]


def scale_for(values: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Of the largest value along the last dimension."""
    most = values.abs().amax(-1) if values.shape[-1] else values.new_zeros(values.shape[:-1])
    scales = [expected_scale(m.item(), dtype, power_of_two) for m in most.flatten()]
    return torch.tensor(scales, dtype=torch.float32).view(most.shape)


def check_vectors(x: Tensor, made: Codes, sizes: list[int], scaling: VectorScaling) -> None:
    values, (dtype, power) = x.cpu().float(), scaling
    if made.rows is not None:
        assert made.rows.shape == x.shape
        s = scale_for(values, dtype, power)
        assert_scales(made.row_scale, inverse(s))
        assert torch.equal(bits(made.rows), expected(values, s[:, None], dtype))
    if made.cols is not None:
        assert made.cols.shape[1] % 128 == 0
        scales = []
        for at, padded in bounds(sizes):
            s = scale_for(values[at].t(), dtype, power)
            scales.append(inverse(s))
            found = bits(made.cols)[:, padded]
            size = at.stop - at.start
            assert torch.equal(found[:, :size], expected(values[at].t(), s[:, None], dtype))
            assert not found[:, size:].any()
        assert_scales(made.col_scale, torch.cat(scales))


@each_routing
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_where_groups_end(sizes: list[int], dtype: torch.dtype, device: torch.device) -> None:
    found = group_ends(torch.tensor(sizes, device=device, dtype=dtype), sum(sizes))
    assert found.dtype == torch.int32
    assert found.tolist() == [[at.stop for at in row] for row in zip(*bounds(sizes))]


def test_groups_stay_within_their_rows(device: torch.device) -> None:
    """Sizes on a GPU are not checked: whatever they are, no kernel leaves its tensors."""
    found = group_ends(torch.tensor([3, -5, 200, 7, 1], device=device), 150)
    assert found.tolist() == [[3, 3, 150, 150, 150], [128, 256, 512, 640, 768]]


@each_routing_with(
    "features, source, scaling",
    [16, torch.float32, VectorScaling(E4M3)],
    [48, torch.bfloat16, VectorScaling(E5M2)],
    [128, torch.bfloat16, VectorScaling(E4M3, power_of_two=True)],
    [208, torch.float16, VectorScaling(E4M3)],
)
def test_a_scale_for_each_row_and_column(
    sizes: list[int],
    features: int,
    source: torch.dtype,
    scaling: VectorScaling,
    device: torch.device,
) -> None:
    x, ends = matrix(sum(sizes), features, device, source), ends_of(sizes, device)
    for rows, cols in ((True, True), (True, False), (False, True)):
        made = quantize_groups(x, Grouped(len(sizes), ends), scaling, rows=rows, cols=cols)
        is_wanted(made, rows, cols)
        check_vectors(x, made, sizes, scaling)


def test_rows_that_are_not_finite_or_zero(device: torch.device) -> None:
    """Each spoils its own row and, by columns, those of its group that hold it."""
    sizes = [3, 2]
    x = torch.randn(5, 32)
    x[0], x[1, 4], x[3, 7] = 0.0, NAN, float("inf")
    made = quantize_groups(
        x.to(device), Grouped(2, ends_of(sizes, device)), VectorScaling(E4M3), rows=True, cols=True
    )
    check_vectors(x, made, sizes, VectorScaling(E4M3))
    assert made.row_scale.isnan().tolist() == [False, True, False, True, False]
    assert made.col_scale.isnan().nonzero().flatten().tolist() == [4, 32 + 7]


@each_routing_with("measured", False, True)
def test_one_scale_is_that_of_every_row(
    sizes: list[int], measured: bool, device: torch.device
) -> None:
    x, ends = matrix(sum(sizes), 80, device, torch.bfloat16), ends_of(sizes, device)
    most = torch.full((1,), 3.0, device=device)
    seen = torch.zeros(1, device=device)
    scaling: Any = MeasuredScaling(most, E5M2) if measured else TensorScaling(most, E5M2, seen)
    made = quantize_groups(x, Grouped(len(sizes), ends), scaling, rows=True, cols=True)
    s = torch.tensor(expected_scale(3.0, E5M2, False)) if measured else torch.tensor(3.0)
    want = expected(x, s, E5M2)
    assert torch.equal(bits(made.rows), want)
    assert_scales(made.row_scale, inverse(s).expand(len(x)).contiguous())
    assert_scales(made.col_scale, inverse(s).expand(len(sizes) * 80).contiguous())
    for at, padded in bounds(sizes):
        found = bits(made.cols)[:, padded]
        assert torch.equal(found[:, : at.stop - at.start], want[at].t())
        assert not found[:, at.stop - at.start :].any()
    if not measured:
        assert seen.item() == (x.abs().max().item() if len(x) else 0)


@pytest.mark.parametrize(
    ("scales", "rows"), [("vectors", 144), ("own", 16), ("own", 144), ("one", 128)]
)
def test_matrices_of_one_size_need_no_ends(scales: str, rows: int, device: torch.device) -> None:
    """Weights of all groups, one below the other: each has its scale, or its scales."""
    count, features = 3, 48
    x, sizes = matrix(count * rows, features, device, torch.bfloat16), [rows] * count
    if scales == "vectors":
        made = quantize_groups(x, Grouped(count), VectorScaling(E4M3), rows=True, cols=True)
        check_vectors(x, made, sizes, VectorScaling(E4M3))
        return
    own = torch.tensor([1.0, 2.0, 4.0] if scales == "own" else [2.0], device=device)
    made = quantize_groups(x, Grouped(count), TensorScaling(own, E4M3), rows=True, cols=True)
    s = own.cpu().expand(count).repeat_interleave(rows)
    want = expected(x, s[:, None], E4M3)
    assert torch.equal(bits(made.rows), want)
    assert_scales(made.row_scale, inverse(s))
    assert_scales(made.col_scale, inverse(own.cpu().expand(count).repeat_interleave(features)))
    assert made.cols.shape == (features, count * -(-rows // 128) * 128)
    for at, padded in bounds(sizes):
        assert torch.equal(bits(made.cols)[:, padded][:, :rows], want[at].t())


@each_routing_with(
    "scaling",
    BlockScaling(E4M3),
    BlockScaling(E4M3, power_of_two=False),
    BlockScaling(E4M3, True, True),
)
def test_blocks(sizes: list[int], scaling: BlockScaling, device: torch.device) -> None:
    x, ends = matrix(sum(sizes), 256, device, torch.bfloat16), ends_of(sizes, device)
    made = quantize_groups(x, Grouped(len(sizes), ends), scaling, rows=True, cols=True)
    values, (dtype, power, squares) = x.cpu().float(), scaling
    blocks = values.unflatten(1, (-1, 128))
    s = scale_for(blocks, dtype, power)
    assert_scales(made.row_scale, inverse(s.t().contiguous()))
    assert torch.equal(bits(made.rows), expected(blocks, s[:, :, None], dtype).flatten(1))
    for at, padded in bounds(sizes):
        own = torch.zeros(padded.stop - padded.start, 256)
        own[: at.stop - at.start] = values[at]
        found = bits(made.cols)[:, padded]
        for n, block in enumerate(own.split(128), padded.start // 128):
            here = slice(128 * n - padded.start, 128 * (n + 1) - padded.start)
            if squares:
                s = scale_for(block.t().reshape(2, -1), dtype, power)
                got, each = made.col_scale[:, n], s.repeat_interleave(128)
            else:
                each = s = scale_for(block.t(), dtype, power)
                got = made.col_scale[n]
            assert_scales(got.contiguous(), inverse(s))
            assert torch.equal(found[:, here], expected(block.t(), each[:, None], dtype))


class Matrix(NamedTuple):
    """Codes (M, K), and the scale of each in float64."""

    codes: Tensor
    scales: Tensor

    def __getitem__(self, at: Any) -> Matrix:
        return Matrix(self.codes[at], self.scales[at])

    def values(self) -> Tensor:
        return self.codes.cpu().double() * self.scales

    def t(self) -> Matrix:
        return Matrix(self.codes.t(), self.scales.t())


def of_rows(codes: Tensor, scale: Tensor) -> Matrix:
    """Codes (M, K) with scales (M,), or (K / 128, M)."""
    each = scale.cpu().double()
    each = each[:, None] if scale.dim() == 1 else each.t().repeat_interleave(128, 1)
    return Matrix(codes, each.expand(codes.shape))


def of_squares(codes: Tensor, scale: Tensor) -> Matrix:
    """Codes (M, K) with scales (M / 128, at least K / 128)."""
    rows, cols = codes.shape[0] // 128, codes.shape[1] // 128
    each = scale.cpu().double()[:rows, :cols]
    return Matrix(codes, each.repeat_interleave(128, 0).repeat_interleave(128, 1))


def of_torch(left: Matrix, right: Matrix) -> Tensor:
    """The product by torch's GEMM of the device, each 128 products scaled and added in float64."""
    total, one = 0.0, torch.ones((), device=left.codes.device)
    for at in range(0, left.codes.shape[1], 128):
        a, b = left[:, at : at + 128], right[:, at : at + 128]
        codes = a.codes.contiguous(), b.codes.contiguous().t()
        part = torch._scaled_mm(*codes, one, one, out_dtype=torch.float32, use_fast_accum=False)
        total = total + part.cpu().double() * a.scales[:, :1] * b.scales[:, :1].t()
    return torch.as_tensor(total)


def assert_product(got: Tensor, left: Matrix, right: Matrix, dtype: torch.dtype) -> None:
    """Sums in fp32, rounded once; on a GPU as exact as its tensor cores add up."""
    assert got.dtype == dtype
    want = left.values() @ right.values().t()
    eps = max(torch.finfo(dtype).eps, 2**-21)
    allowed = eps * (want.abs().max().item() if want.numel() else 1.0)
    if got.is_cuda and want.numel() and left.codes.shape[1]:
        allowed += 2 * (of_torch(left, right) - want).abs().max().item()
    torch.testing.assert_close(got.cpu().double(), want, rtol=eps, atol=allowed)


@each_routing_with(
    "n, k, dtype, formats, split",
    [16, 48, torch.bfloat16, (E4M3, E4M3), False],
    [144, 272, torch.float32, (E5M2, E4M3), True],
    [128, 128, torch.float16, (E4M3, E4M3), True],
)
def test_products_of_vectors(
    sizes: list[int],
    n: int,
    k: int,
    dtype: torch.dtype,
    formats: tuple[torch.dtype, torch.dtype],
    split: bool,
    device: torch.device,
) -> None:
    count, ends = len(sizes), ends_of(sizes, device)
    x, dy, w = (matrix(rows, cols, device) for rows, cols in
                ((sum(sizes), k), (sum(sizes), n), (count * n, k)))  # fmt: skip
    both: Any = {"rows": True, "cols": True}
    xq, wq = (
        quantize_groups(t, Grouped(count, at), VectorScaling(formats[1]), **both)
        for t, at in ((x, ends), (w, None))
    )
    dyq = quantize_groups(dy, Grouped(count, ends), VectorScaling(formats[0]), **both)
    for codes in (xq, dyq, wq):
        assert None not in codes[:4]
    of_x, of_dy = of_rows(xq.rows, xq.row_scale), of_rows(dyq.rows, dyq.row_scale)

    padded = wq.cols.shape[1] // count
    b: Any = wq.rows.view(count, n, k)
    bt: Any = wq.cols.view(k, count, padded)[:, :, :n].transpose(0, 1)
    given: Any = (
        (xq.rows, b, xq.row_scale, wq.row_scale.view(count, n)),
        (dyq.rows, bt, dyq.row_scale, wq.col_scale.view(count, k)),
        (dyq.cols, xq.cols, dyq.col_scale, xq.col_scale),
    )
    y = rows_by_matrices(*given[0], ends, dtype, split=split)
    dx = rows_by_matrices(*given[1], ends, dtype, split=split)
    dw = columns_by_columns(*given[2], ends, dtype, split=split)
    assert (y.shape, dx.shape, dw.shape) == ((len(x), n), (len(x), k), (count, n, k))
    for g, (at, of_cols) in enumerate(bounds(sizes)):
        wg = of_rows(b[g], given[0][3][g])
        assert_product(y[at], of_x[at], wg, dtype)
        assert_product(dx[at], of_dy[at], of_rows(bt[g], given[1][3][g]), dtype)
        left = of_rows(dyq.cols[:, of_cols], dyq.col_scale.view(count, n)[g])
        right = of_rows(xq.cols[:, of_cols], xq.col_scale.view(count, k)[g])
        assert_product(dw[g], left, right, dtype)


@each_routing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_of_values_in_bf16(
    sizes: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Products of bf16 are exact in fp32, in which they are added up; scales follow."""
    n, k, count, ends = 48, 80, len(sizes), ends_of(sizes, device)
    bf16 = torch.bfloat16
    rows, padded = sum(sizes), bounds(sizes)[-1][1].stop
    x, w = matrix(rows, k, device, bf16), matrix(count * n, k, device, bf16).view(count, n, k)
    of_x, of_w = torch.rand(rows, device=device), torch.rand(count, n, device=device)
    y = rows_by_matrices(x, w, of_x, of_w, ends, dtype, split=True)
    left, right = matrix(n, padded, device, bf16), matrix(k, padded, device, bf16)
    of_left, of_right = torch.rand(count * n, device=device), torch.rand(count * k, device=device)
    dw = columns_by_columns(left, right, of_left, of_right, ends, dtype, split=True)
    # Tensor cores cut off what their sums have no bits for.
    eps = max(torch.finfo(dtype).eps, 2**-18 if x.is_cuda else 2**-21)
    for g, (at, of_cols) in enumerate(bounds(sizes)):
        pairs = (
            (y[at], of_rows(x[at], of_x[at]), of_rows(w[g], of_w[g])),
            (
                dw[g],
                of_rows(left[:, of_cols], of_left.view(count, n)[g]),
                of_rows(right[:, of_cols], of_right.view(count, k)[g]),
            ),
        )
        for got, a, b in pairs:
            want = a.values() @ b.values().t()
            allowed = eps * (want.abs().max().item() if want.numel() else 1.0)
            torch.testing.assert_close(got.cpu().double(), want, rtol=eps, atol=allowed)


@each_routing_with("squares", False, True)
def test_products_of_blocks(sizes: list[int], squares: bool, device: torch.device) -> None:
    n, k, count, dtype = 128, 384, len(sizes), torch.float32
    ends = ends_of(sizes, device)
    x, dy = matrix(sum(sizes), k, device), matrix(sum(sizes), n, device)
    w = matrix(count * n, k, device)
    both: Any = {"rows": True, "cols": True}
    xq: Any = quantize_groups(x, Grouped(count, ends), BlockScaling(E4M3, True, squares), **both)
    dyq: Any = quantize_groups(dy, Grouped(count, ends), BlockScaling(E4M3), **both)
    wq: Any = quantize_by_squares(w, E4M3, **both)
    b, bt = wq.rows.view(count, n, k), wq.cols.view(k, count, n).transpose(0, 1)
    scale = wq.row_scale[:, : k // 128].view(count, n // 128, k // 128)
    scale_t = wq.col_scale[:, : count * n // 128].view(k // 128, count, n // 128).transpose(0, 1)
    y = rows_by_matrices(xq.rows, b, xq.row_scale, scale, ends, dtype, split=True)
    dx = rows_by_matrices(dyq.rows, bt, dyq.row_scale, scale_t, ends, dtype, split=True)
    dw = columns_by_columns(dyq.cols, xq.cols, dyq.col_scale, xq.col_scale, ends, dtype, split=True)
    of_x, of_dy = of_rows(xq.rows, xq.row_scale), of_rows(dyq.rows, dyq.row_scale)
    for g, (at, padded) in enumerate(bounds(sizes)):
        wg = of_squares(b[g], scale[g])
        assert_product(y[at], of_x[at], wg, dtype)
        assert_product(dx[at], of_dy[at], wg.t(), dtype)
        blocks = slice(padded.start // 128, padded.stop // 128)
        left = of_rows(dyq.cols[:, padded], dyq.col_scale[blocks])
        if squares:
            right = of_squares(xq.cols[:, padded], xq.col_scale[:, blocks])
        else:
            right = of_rows(xq.cols[:, padded], xq.col_scale[blocks])
        assert_product(dw[g], left, right, dtype)


def test_results_in_given_memory(device: torch.device) -> None:
    sizes = [3, 0, 5]
    ends, x, w = ends_of(sizes, device), matrix(8, 32, device), matrix(48, 32, device)
    scaling = VectorScaling(E4M3)
    xq: Any = quantize_groups(x, Grouped(3, ends), scaling, rows=True, cols=True)
    wq: Any = quantize_groups(w, Grouped(3), scaling, rows=True, cols=False)
    given = xq.rows, wq.rows.view(3, 16, 32), xq.row_scale, wq.row_scale.view(3, 16), ends
    out = torch.full((8, 16), NAN, device=device)
    assert rows_by_matrices(*given, torch.float32, split=True, out=out) is out
    torch.testing.assert_close(out, rows_by_matrices(*given, torch.float32, split=True))


@each_routing_with(
    "scaling, integer",
    [VectorScaling(E4M3), torch.int64],
    [TensorScaling(torch.tensor([3.0]), E5M2), torch.int32],
    [BlockScaling(E4M3, True, True), torch.int32],
)
def test_rows_that_are_gathered(
    sizes: list[int], scaling: Any, integer: torch.dtype, device: torch.device
) -> None:
    """The codes are those of a copy of the rows, bit for bit; some rows are read twice."""
    x, ends = matrix(40, 128, device, torch.bfloat16), ends_of(sizes, device)
    if isinstance(scaling, TensorScaling):
        scaling = TensorScaling(torch.tensor([3.0], device=device), E5M2)
    sources = torch.randint(40, (sum(sizes),), device=device, dtype=integer)
    how: Any = {"rows": True, "cols": True}
    made = quantize_groups(x, Grouped(len(sizes), ends, sources), scaling, **how)
    copied = quantize_groups(x[sources], Grouped(len(sizes), ends), scaling, **how)
    used = bounds(sizes)[-1][1].stop
    for own, other in ((made.rows, copied.rows), (made.cols, copied.cols)):
        assert torch.equal(bits(own)[:, :used], bits(other)[:, :used])
    assert_scales(made.row_scale, copied.row_scale.cpu())
    if not isinstance(scaling, BlockScaling):
        assert_scales(made.col_scale, copied.col_scale.cpu())
    else:
        own, other = made.col_scale, copied.col_scale
        blocks = used // 128
        torch.testing.assert_close(own[:, :blocks], other[:, :blocks], rtol=0, atol=0)

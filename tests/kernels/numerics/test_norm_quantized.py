"""Norms to fp8 against float64, and bit for bit against the fp32 values that they encode."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor

from opfuser.kernels import norm, norm_launch, norm_quantized
from opfuser.kernels.launch import INTERPRETED, has_fp8, recorded
from opfuser.kernels.norm_quantized import norm_cols_quantized, norm_forward_quantized
from opfuser.kernels.norm_quantized_plain import QuantizedNorm
from opfuser.kernels.quantize import (
    BlockScaling,
    Codes,
    MeasuredScaling,
    Scaling,
    TensorScaling,
    quantize_by_squares,
    scale_for,
)
from tests.kernels.codes import (
    E4M3,
    E5M2,
    TOP,
    assert_codes,
    assert_scales,
    bits,
    expected,
    expected_scale,
    inverse,
    is_wanted,
    padded,
)
from tests.kernels.norms import EPS, Case, make

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# The interpreter of triton 3.9 rounds a fused multiply-add once, as GPUs do; earlier ones twice.
EXACT_FMA = INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
KINDS = RMS, LAYER, NO_BIAS, L2 = ["rms", "layer", "layer without bias", "l2"]
INF, NAN = math.inf, math.nan

# A GPU is silent about overflow and infinities; the interpreter's numpy is not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Norm(NamedTuple):
    """Arguments of a norm before those that say how it is quantized."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    zero_centered: bool
    with_mean: bool

    def forward(self, scaling: Scaling) -> QuantizedNorm:
        return norm_forward_quantized(*self, scaling)

    def columns(self, made: QuantizedNorm | norm.NormForward, scaling: Scaling) -> Codes:
        total = self.x if made.total is None else made.total
        codes = norm_cols_quantized(
            total, self.weight, self.bias, made.mean, made.rstd, self.zero_centered, scaling
        )
        assert isinstance(codes, Codes)
        return codes

    def alone(self, total: Tensor | None) -> Norm:
        """Of the sum, once it is there."""
        return self if total is None else self._replace(x=total, residual=None)


def norm_of(case: Case, kind: str = RMS, eps: float = EPS) -> Norm:
    weight = None if kind == L2 else case.weight
    return Norm(case.x, case.residual, weight, case.bias, eps, case.centered, case.layer)


def given(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    add: bool = False,
    centered: bool = False,
    parameters: torch.dtype | None = None,
    pitch: int = 0,
) -> Norm:
    like = RMS if kind == L2 else kind
    how = {"add": add, "centered": centered, "parameters": parameters, "pitch": pitch}
    return norm_of(make(like, shape, dtype, device, **how), kind)


def exact(of: Norm) -> Tensor:
    """The norm in float64, (R, D), on the CPU."""
    x = of.x.detach().cpu().double().reshape(-1, of.x.shape[-1])
    mean = x.mean(1, keepdim=True) if of.with_mean else 0.0
    squares = (x - mean).square()
    share = squares.sum(1) if of.weight is None else squares.mean(1)
    y = (x - mean) * torch.rsqrt(share + of.eps)[:, None]
    if of.weight is not None:
        y = y * (of.weight.cpu().double() + of.zero_centered)
    return y if of.bias is None else y + of.bias.cpu().double()


def encoded(of: Norm, made: QuantizedNorm | norm.NormForward) -> Tensor:
    """The fp32 values (R, D) that are to be encoded, from statistics of forward, on the CPU."""
    x = of.x.detach().cpu().float().reshape(-1, of.x.shape[-1])
    rstd = made.rstd.cpu().float().reshape(-1, 1)
    if made.mean is not None:
        x = x - made.mean.cpu().float().reshape(-1, 1)
    scale, bias = torch.ones(()), torch.zeros(())
    if of.weight is not None:
        scale = of.weight.cpu().float() + of.zero_centered
    if of.bias is not None:
        bias = of.bias.cpu().float()
    if of.x.is_cuda or EXACT_FMA:  # rounded once: in float64 the product is exact
        return ((x * rstd).double() * scale.double() + bias.double()).float()
    return (x * rstd) * scale + bias


def assert_encoded(
    codes: Tensor, scales: Tensor, lines: Tensor, inside: Tensor, scaling: Scaling, what: str
) -> None:
    """Codes of lines of values, padding included, which is where ``inside`` is false.

    Blocks are along the lines; scales are those of (block, line), of squares those of 128 lines.
    """
    values = torch.where(inside, lines, 0.0)
    if what == "columns" and isinstance(scaling, BlockScaling) and scaling.square_cols:
        how: Any = {"rows": True, "cols": False, "power_of_two": scaling.power_of_two}
        squares = quantize_by_squares(values, scaling.dtype, **how)
        assert_scales(scales, squares.row_scale, what)
        want = squares.rows.view(torch.uint8)
    elif isinstance(scaling, TensorScaling):
        want = expected(values, scaling.scale, scaling.dtype)
        assert_scales(scales, inverse(scaling.scale.cpu()), what)
    else:
        blocks = values.unflatten(1, (-1, 128))
        amax = blocks.abs().amax(2)
        each = [
            expected_scale(a, scaling.dtype, scaling.power_of_two) for a in amax.view(-1).tolist()
        ]
        s = torch.tensor(each).view(amax.shape)
        want = expected(blocks, s.unsqueeze(2), scaling.dtype).flatten(1)
        assert_scales(scales, inverse(s.t()), what)
    assert_codes(codes, torch.where(inside, want, 0).to(torch.uint8), scaling.dtype, what)


def assert_same(got: Tensor | None, want: Tensor | None, what: str) -> None:
    """Equal bits, but for those of a NaN."""
    assert (got is None) == (want is None), what
    if got is not None:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=what)
        assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan()), what
        assert got.is_contiguous(), what


def check(
    of: Norm, scaling: Scaling, of_cols: Scaling | None = None
) -> tuple[QuantizedNorm, Codes]:
    """Both layouts and whatever comes with them; ``of_cols`` has another amax."""
    of_cols = of_cols or scaling
    inputs = [t.clone() for t in of[:4] if t is not None]
    with recorded() as noted:
        meta = of.forward(scaling)
        of.columns(meta, of_cols)
    if has_fp8(of.x):
        names = [one.launch.name for one in noted]
        assert names == ["norm_quantized:forward", "norm_quantized:columns"]
    saved = norm.norm_forward(*of)
    made = of.forward(scaling)
    for name in ("total", "mean", "rstd"):
        assert_same(getattr(made, name), getattr(saved, name), name)
    codes = of.columns(made, of_cols)
    is_wanted(made.y, True, False)
    is_wanted(codes, False, True)
    y = padded(encoded(of.alone(made.total), made))
    inside = (torch.arange(len(y)) < made.rstd.numel())[:, None].expand_as(y)
    assert_encoded(made.y.rows, made.y.row_scale, y, inside, scaling, "rows")
    assert_encoded(codes.cols, codes.col_scale, y.t(), inside.t(), scaling, "columns")
    if isinstance(scaling, TensorScaling):
        assert torch.equal(bits(made.y.rows).t(), bits(codes.cols))
    for t, before in zip((t for t in of[:4] if t is not None), inputs):
        torch.testing.assert_close(t, before, rtol=0, atol=0, equal_nan=True)
    return made, codes


def check_values(of: Norm, dtype: torch.dtype) -> None:
    """What is encoded is the norm, and its maximum is found in the same passes."""
    device, rows = of.x.device, of.x[..., 0].numel()
    total = norm.norm_forward(*of).total
    true = exact(of.alone(total))
    most = true.abs().max().item()
    scale = torch.tensor([TOP[dtype] / max(most, 1e-3)], device=device)
    by_rows, by_cols = (TensorScaling(scale, dtype, torch.zeros(1, device=device)) for _ in "rc")
    made, _ = check(of, by_rows, by_cols)
    values = encoded(of.alone(made.total), made)
    for scaling in (by_rows, by_cols):
        assert_scales(scaling.amax, values.abs().max().view(1), "amax")
    error = (values.double() - true).abs().max().item()
    assert error <= 2**-19 * most, f"off by {error} of {most}"
    assert made.y.rows.shape == (-(-rows // 128) * 128, of.x.shape[-1])


# Several rows per program and one; ends of rows, of blocks of rows and of tiles.
SHAPES = [(1, 1), (1, 5), (127, 65), (128, 128), (129, 130), (130, 33), (2, 4100)]


@pytest.mark.parametrize(
    ("at", "kind"),
    [*((n, KINDS[n % 4]) for n in range(len(SHAPES))), (3, RMS), (4, LAYER), (5, L2)],
    ids=str,
)
def test_values(at: int, kind: str, device: torch.device) -> None:
    """Dtypes and flags come in turn."""
    turn = at + KINDS.index(kind)
    dtype, add, centered = (FP32, BF16, FP16)[turn % 3], turn % 2 == 0, turn // 2 % 2 == 0
    check_values(
        given(kind, SHAPES[at], dtype, device, add=add, centered=centered),
        (E4M3, E5M2)[turn // 3 % 2],
    )


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "fp8", "power_of_two"),
    [
        (RMS, (1, 128), FP32, E4M3, True),
        (LAYER, (127, 384), BF16, E4M3, True),
        (L2, (128, 256), FP16, E5M2, True),
        (NO_BIAS, (129, 256), FP32, E4M3, False),
        (LAYER, (130, 128), BF16, E5M2, False),
        (RMS, (1, 4224), BF16, E4M3, False),
    ],
    ids=str,
)
def test_blocks(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    fp8: torch.dtype,
    power_of_two: bool,
    device: torch.device,
) -> None:
    of = given(kind, shape, dtype, device, add=power_of_two, centered=not power_of_two)
    factors = torch.randn(shape[1], device=device).exp()  # no two blocks have one scale
    if of.weight is not None:
        of = of._replace(weight=(of.weight * factors).to(dtype))
    check(of, BlockScaling(fp8, power_of_two, square_cols=dtype == BF16))


@pytest.mark.parametrize(("most", "kind"), [(norm_launch.FORWARD.max_cols, RMS), (256, NO_BIAS)])
def test_longer_rows(
    most: int, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that no kernel of fp8 takes whole: columns, which do not care, are the transpose."""
    few = dataclasses.replace(norm_launch.FORWARD, max_cols=most)
    monkeypatch.setattr(norm_quantized, "FORWARD", few)
    of = given(kind, (2, most + 128), BF16, device, add=True)
    scaling = TensorScaling(torch.full((1,), 30.0, device=device), E4M3)
    with recorded() as noted:
        of.forward(scaling)
    (name,) = [one.launch.name for one in noted]
    assert name == ("norm:norm_forward_wide" if most > 256 else "norm:norm_forward")
    made, saved = of.forward(scaling), norm.norm_forward(*of)
    for name in ("total", "mean", "rstd"):
        assert_same(getattr(made, name), getattr(saved, name), name)
    summed = of.alone(made.total)
    values = encoded(summed, made)
    assert_codes(made.y.rows, padded(expected(values, 30.0, E4M3)), E4M3)
    true = exact(summed)
    assert (values.double() - true).abs().max() <= 2**-17 * true.abs().max()
    if most == 256:  # the interpreter takes long for many tiles
        assert torch.equal(bits(made.y.rows).t(), bits(of.columns(made, scaling).cols))
    blocks = BlockScaling(E4M3)
    by_rows = of.forward(blocks).y
    y = padded(values)
    inside = (torch.arange(len(y)) < 2)[:, None].expand_as(y)
    assert_encoded(by_rows.rows, by_rows.row_scale, y, inside, blocks, "rows")


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "how"),
    [
        (NO_BIAS, (129, 65), BF16, {"pitch": 5}),
        (L2, (129, 65), BF16, {"pitch": 5}),
        (RMS, (7, 40), BF16, {"parameters": FP32}),
        (LAYER, (7, 40), FP32, {"parameters": BF16}),
        (LAYER, (7, 40), FP16, {"parameters": FP64}),
    ],
    ids=str,
)
def test_rows_apart_and_parameters_of_another_dtype(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, how: Any, device: torch.device
) -> None:
    check_values(given(kind, shape, dtype, device, add=True, **how), E4M3)


@pytest.mark.parametrize("kind", [NO_BIAS, L2])
def test_statistics_that_are_apart(kind: str, device: torch.device) -> None:
    of = given(kind, (9, 128), BF16, device, pitch=16)
    made, _ = check(of, BlockScaling(E4M3))
    statistics = [t if t is None else torch.stack((t, t), 1)[:, 0] for t in made[2:]]
    again = made._replace(mean=statistics[0], rstd=statistics[1])
    for scaling in (BlockScaling(E4M3), TensorScaling(torch.full((1,), 2.0, device=device), E5M2)):
        want, got = of.columns(made, scaling), of.columns(again, scaling)
        assert torch.equal(bits(want.cols), bits(got.cols))
        assert_scales(got.col_scale, want.col_scale.cpu())


@pytest.mark.parametrize(
    ("shape", "kind"), [((65,), RMS), ((2, 3, 64), LAYER), ((2, 0, 64), RMS)], ids=str
)
def test_any_number_of_dimensions(shape: tuple[int, ...], kind: str, device: torch.device) -> None:
    rows, cols = math.prod(shape[:-1]), shape[-1]
    of = given(kind, (rows, cols), BF16, device, add=True)
    scaling = TensorScaling(torch.full((1,), 20.0, device=device), E4M3)
    same = of._replace(x=of.x.view(shape), residual=of.residual.view(shape))
    made, want = same.forward(scaling), of.forward(scaling)
    assert torch.equal(bits(made.y.rows), bits(want.y.rows))
    assert torch.equal(bits(same.columns(made, scaling).cols), bits(of.columns(want, scaling).cols))
    assert [made.total.shape, made.rstd.shape] == [shape, shape[:-1]]
    assert torch.equal(made.total.view(-1), want.total.view(-1))
    assert torch.equal(made.rstd.view(-1), want.rstd.view(-1))


@pytest.mark.parametrize("scaling", [TensorScaling, BlockScaling])
@pytest.mark.parametrize("kind", [RMS, LAYER])
def test_no_rows(kind: str, scaling: type, device: torch.device) -> None:
    of = given(kind, (0, 256), BF16, device, add=True)
    amax = torch.ones(1, device=device)
    four = torch.full((1,), 4.0, device=device)
    how = TensorScaling(four, E4M3, amax) if scaling is TensorScaling else BlockScaling(E4M3)
    made = of.forward(how)
    codes = of.columns(made, how)
    assert (made.y.rows.shape, codes.cols.shape) == ((0, 256), (256, 0))
    assert (made.total.shape, made.rstd.shape) == ((0, 256), (0,))
    if scaling is TensorScaling:
        assert made.y.row_scale.tolist() == codes.col_scale.tolist() == [0.25]
    else:
        assert (made.y.row_scale.shape, codes.col_scale.shape) == ((2, 0), (0, 256))
    assert amax.tolist() == [1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_fp64_has_no_kernel(kind: str, device: torch.device) -> None:
    of = given(kind, (5, 40), FP64, device, add=True)
    amax, scale = torch.zeros(1, device=device), torch.full((1,), 20.0, device=device)
    scaling = TensorScaling(scale, E4M3, amax)
    with recorded() as noted:
        made = of.forward(scaling)
        codes = of.columns(made, scaling)
    assert not noted
    true = exact(of.alone(made.total))
    torch.testing.assert_close(amax.cpu(), true.abs().max().float().view(1), rtol=1e-6, atol=0.0)
    assert torch.equal(bits(made.y.rows).t(), bits(codes.cols))
    got = made.y.rows[:5].cpu().double() / 20
    torch.testing.assert_close(got, true, rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize(
    ("value", "kind"), [(NAN, RMS), (NAN, L2), (INF, LAYER), (-INF, NO_BIAS), (INF, L2)]
)
def test_what_is_not_finite_shows(value: float, kind: str, device: torch.device) -> None:
    of = given(kind, (130, 128), BF16, device)
    of.x[129, 17] = of.x[3, 125] = value
    amax, one = torch.zeros(2, 1, device=device), torch.ones(1, device=device)
    made, codes = check(of, *(TensorScaling(one, E4M3, a) for a in amax))
    assert amax.isnan().all()
    for rows in (made.y.rows, codes.cols.t()):
        assert rows.float().isnan().any(1).nonzero().view(-1).tolist() == [3, 129]
    check(of, BlockScaling(E4M3))


def test_an_infinite_weight_saturates_and_reaches_amax(device: torch.device) -> None:
    of = given(RMS, (3, 65), FP32, device)
    of.weight[64] = INF
    amax = torch.zeros(1, device=device)
    made, _ = check(of, TensorScaling(torch.ones(1, device=device), E5M2, amax))
    assert made.y.rows[:3, 64].float().abs().tolist() == [57344.0] * 3
    assert amax.tolist() == [INF]


def test_columns_that_do_not_exist_are_in_no_maximum(device: torch.device) -> None:
    """Squares that underflow, and an eps of 0: there 0 times infinity."""
    of = given(L2, (2, 65), FP32, device)._replace(eps=0.0)
    of.x.fill_(1e-30)
    one = torch.ones(1, device=device)
    amax, cols_amax = torch.zeros(2, 1, device=device)
    saved = norm.norm_forward(*of)
    if not saved.rstd.isinf().all():
        pytest.skip("norms of tiny numbers do not underflow here")
    made = of.forward(TensorScaling(one, E4M3, amax))
    codes = of.columns(made, TensorScaling(one, E4M3, cols_amax))
    assert amax.tolist() == cols_amax.tolist() == [INF]
    assert made.y.rows[:2].float().unique().tolist() == [448.0]
    assert torch.equal(bits(made.y.rows).t(), bits(codes.cols))


@pytest.mark.parametrize("scale", [1.0, NAN])
def test_padding_is_0_whatever_the_scale_and_the_bias(scale: float, device: torch.device) -> None:
    """The norm is 0 here, and that of a row of padding were the bias."""
    x = torch.tensor([[1.0, -1.0]], device=device).repeat(3, 32)
    bias = torch.full((64,), 5.0, device=device)
    of = Norm(x, None, -5.0 * x[0], bias, 1e-12, False, True)
    s, amax = torch.full((1,), scale, device=device), torch.zeros(2, 1, device=device)
    made = of.forward(TensorScaling(s, E4M3, amax[0]))
    codes = of.columns(made, TensorScaling(s, E4M3, amax[1])).cols.t()
    assert (amax < 1e-4).all()
    for rows in (made.y.rows, codes):
        assert rows[:3].float().isnan().all() == math.isnan(scale)
        assert rows.shape == (128, 64)
        assert not rows[3:].view(torch.uint8).count_nonzero()


def test_zeros_have_no_sign(device: torch.device) -> None:
    of = given(RMS, (2, 64), BF16, device)
    of.x.fill_(-0.0)
    made, _ = check(of, TensorScaling(torch.ones(1, device=device), E4M3))
    assert not made.y.rows.view(torch.uint8).count_nonzero()


@pytest.mark.parametrize(("before", "wins"), [(0.0, False), (1e6, True), (NAN, True)], ids=str)
def test_amax_is_raised(before: float, wins: bool, device: torch.device) -> None:
    """With a scale and without; then nothing is encoded."""
    of = given(LAYER, (129, 130), BF16, device, add=True)
    plain = norm.norm_forward(*of)
    want = encoded(of.alone(plain.total), plain).abs().max().view(1)
    want = torch.tensor([before]) if wins else want
    for scale in (None, torch.ones(1, device=device)):
        for columns in (False, True):
            amax = torch.tensor([before], device=device)
            scaling = TensorScaling(scale, E4M3, amax)
            made = of.columns(plain, scaling) if columns else of.forward(scaling).y
            assert_scales(amax, want)
            if scale is None:
                assert made == Codes(None, None, None, None, None)


@pytest.mark.parametrize(
    ("kind", "fp8", "amax", "power_of_two"),
    [
        (LAYER, E4M3, 3.7, False),
        (RMS, E5M2, 3.7, True),
        (RMS, E4M3, 0.0, True),
        (LAYER, E5M2, INF, False),
    ],
    ids=str,
)
def test_a_scale_from_the_largest_value(
    kind: str, fp8: torch.dtype, amax: float, power_of_two: bool, device: torch.device
) -> None:
    of, given_ = given(kind, (9, 65), BF16, device, add=True), torch.tensor([amax], device=device)
    scaling = MeasuredScaling(given_, fp8, power_of_two)
    want = TensorScaling(scale_for(given_, fp8, power_of_two=power_of_two), fp8)
    made, by_given = of.forward(scaling), of.forward(want)
    codes, cols_by_given = of.columns(made, scaling), of.columns(made, want)
    assert torch.equal(bits(made.y.rows), bits(by_given.y.rows))
    assert torch.equal(bits(codes.cols), bits(cols_by_given.cols))
    for got in (made.y.row_scale, codes.col_scale):
        assert_scales(got, inverse(want.scale.cpu()))
    assert_scales(given_, torch.tensor([amax]), "it is only read")


@pytest.mark.parametrize(("kind", "add"), [*zip(KINDS, [False, True, True, False])])
def test_a_second_call_encodes_the_sum_of_the_first(
    kind: str, add: bool, device: torch.device
) -> None:
    of = given(kind, (129, 65), BF16, device, add=add, centered=True)
    amax, want = torch.zeros(1, device=device), norm.norm_forward(*of)
    first = of.forward(TensorScaling(None, E4M3, amax))
    for name in ("total", "mean", "rstd"):
        assert_same(getattr(first, name), getattr(want, name), name)
    scaling = TensorScaling(448.0 / amax, E4M3)
    second, direct = of.alone(first.total).forward(scaling), of.forward(scaling)
    assert second.total is None
    for name in ("mean", "rstd"):
        assert_same(getattr(second, name), getattr(want, name), name)
    assert torch.equal(bits(second.y.rows), bits(direct.y.rows))
    assert second.y.rows.float().abs().max() == 448.0


def test_blocks_by_rows_refuse_columns_that_do_not_fill_them(device: torch.device) -> None:
    of = given(RMS, (2, 130), BF16, device)
    with pytest.raises(RuntimeError, match="130"):
        of.forward(BlockScaling(E4M3))
    made, y = norm.norm_forward(*of), torch.zeros(128, 130)
    y[:2] = encoded(of, made)
    codes, inside = of.columns(made, BlockScaling(E4M3)), (torch.arange(128) < 2).expand(130, 128)
    assert_encoded(codes.cols, codes.col_scale, y.t(), inside, BlockScaling(E4M3), "columns")


@pytest.mark.kernels
def test_columns_must_be_side_by_side(device: torch.device) -> None:
    x = torch.ones(4, 3, device=device).t()
    of = Norm(x, None, torch.ones(4, device=device), None, EPS, False, False)
    apart = of._replace(x=torch.ones(3, 4, device=device), residual=x)
    scaling = TensorScaling(torch.ones(1, device=device), E4M3)
    saved = norm.NormForward(x, None, None, torch.ones(3, device=device))
    text = r"side by side, but received strides \(1, 3\)\. Pass x\.contiguous\(\)\."
    for call in (of.forward, apart.forward, lambda scaling: of.columns(saved, scaling)):
        with pytest.raises(ValueError, match=text):
            call(scaling)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 1040), (2048, 3584), (515, 8192)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_transpose_is_that_of_the_rows_on_a_gpu(kind: str, shape: tuple[int, int]) -> None:
    """An assembler may compile what is packed into words wrongly."""
    device = torch.device("cuda")
    for dtype in (BF16, FP32, FP16):
        of = given(kind, shape, dtype, device, add=True)
        scaling = TensorScaling(torch.full((1,), 60.0, device=device), E4M3)
        check(of, scaling)

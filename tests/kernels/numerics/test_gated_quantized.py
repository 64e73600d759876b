from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.kernels.functions import Relu, Swish
from opfuser.kernels.gated import gated_backward, gated_forward
from opfuser.kernels.gated_plain import Glu, ProductSpec, product_spec
from opfuser.kernels.gated_quantized import (
    gated_backward_quantized,
    gated_forward_and_input,
    gated_forward_quantized,
    quantize_input,
)
from opfuser.kernels.quantize import (
    BlockScaling,
    Codes,
    MeasuredScaling,
    Scaling,
    TensorScaling,
    dequantize,
    quantize,
    scale_for,
)
from opfuser.kernels.quantize_plain import by_blocks_plain
from opfuser.kernels.scalar import ScalarFunction
from tests.kernels.activations import FUNCTIONS, PRODUCTS, columns, expected_gated, tensor
from tests.kernels.codes import (
    E4M3,
    E5M2,
    TOP,
    assert_blocks,
    assert_scales,
    bits,
    inverse,
    is_wanted,
    padded,
    uneven,
    values,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# A GPU is silent about overflow and infinities; the interpreter's numpy is not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def rounded_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The least value of the format that is not below x, or the largest one."""
    grid = torch.tensor(values(dtype), dtype=torch.float64)
    grid = torch.cat((-grid.flip(0), grid))
    return grid[torch.searchsorted(grid, x.contiguous()).clamp_max(len(grid) - 1)]


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Of values of the format; which one in the middle of two is open."""
    up, down = rounded_up(x, dtype), -rounded_up(-x, dtype)
    return torch.where(up - x < x - down, up, down)


def assert_rounded(codes: Tensor, exact: Tensor, scale: float, what: str) -> None:
    """Of values that fp32 makes from terms up to the largest one: 32 of its roundings of it."""
    dtype = codes.dtype
    off = 2**-19 * exact.abs().max() if exact.numel() else 0.0
    lowest, highest = (nearest(padded(exact + d) * scale, dtype) for d in (-off, off))
    lowest[len(exact) :] = highest[len(exact) :] = 0.0
    got = codes.double()
    assert got.shape == lowest.shape, f"{what}: {got.shape}"
    wrong = ((got < lowest) | (got > highest) | got.isnan()).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} codes, as at {wrong[0].tolist()}"


def scale_of(exact: Tensor, dtype: torch.dtype) -> float:
    return TOP[dtype] / max(exact.abs().max().item(), 1e-3)


def exact_gated(
    f: Glu | ScalarFunction, x: Tensor, bias: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """h and dx in float64, on the CPU."""
    z = x.double() if bias is None else x.double() + bias.double()
    h, dx, _ = expected_gated(f, z, dy, None, torch.float64)
    return h.cpu(), dx.cpu()


def assert_sums(got: Tensor, dx: Tensor, dtype: torch.dtype) -> None:
    """Of what is off as in :func:`assert_rounded`, rounded once."""
    assert (got.dtype, got.shape) == (dtype, dx.shape[1:])
    exact = dx.sum(0)
    off = 2**-19 * len(dx) * dx.abs().max() if dx.numel() else 0.0
    wrong = (got.cpu().double() - exact).abs() > torch.finfo(dtype).eps * exact.abs() + off
    assert not wrong.any(), f"{wrong.sum()} sums"


def check(
    f: Glu | ScalarFunction,
    x: Tensor,
    dy: Tensor,
    dtype: torch.dtype = E5M2,
    h_dtype: torch.dtype = E4M3,
    bias: Tensor | None = None,
) -> None:
    spec, device = product_spec(f), x.device
    given = x.clone(), dy.clone()
    h, dx = exact_gated(f, x, bias, dy)
    scale, h_scale = scale_of(dx, dtype), scale_of(h, h_dtype)
    s, hs = torch.tensor([scale], device=device), torch.tensor([h_scale], device=device)
    amax, dx_amax, h_amax, *alone = (torch.zeros(1, device=device) for _ in range(6))
    forward = gated_forward_quantized(x, bias, spec, TensorScaling(hs, h_dtype, amax))
    made = gated_backward_quantized(
        dy, x, bias, spec, TensorScaling(s, dtype, dx_amax), TensorScaling(hs, h_dtype),
        column_sum=True,
    )  # fmt: skip
    again = gated_backward_quantized(
        dy, x, bias, spec, TensorScaling(s, dtype), TensorScaling(hs, h_dtype, h_amax)
    )
    is_wanted(forward, True, False)
    is_wanted(made.dx, True, True, True)
    is_wanted(again.dx, True, True)
    is_wanted(made.h, False, True)
    assert_rounded(forward.rows.cpu(), h, h_scale, "h by rows")
    assert_rounded(made.dx.rows.cpu(), dx, scale, "dx by rows")
    assert_rounded(made.h.cols.t().cpu(), h, h_scale, "h by columns")
    assert torch.equal(bits(made.dx.rows).t(), bits(made.dx.cols))
    assert_sums(made.dx.column_sum, dx, x.dtype)
    for one, other in zip((*made.dx[:4], *made.h), (*again.dx[:4], *again.h)):
        if one is not None:
            assert one.is_contiguous()
            assert torch.equal(one.float(), other.float()), "amaxes and sums change nothing"
    for got, want in ((forward.row_scale, hs), (made.h.col_scale, hs)):
        assert_scales(got, inverse(want.cpu()))
    for got in (made.dx.row_scale, made.dx.col_scale):
        assert_scales(got, inverse(s.cpu()))
    for got, exact in ((amax, h), (dx_amax, dx), (h_amax, h)):
        torch.testing.assert_close(got.item(), exact.abs().max().item(), rtol=1e-5, atol=0.0)
    check_maxima_alone(x, dy, bias, spec, made.dx.column_sum, (amax, dx_amax, h_amax), alone)
    assert torch.equal(x, given[0])
    assert torch.equal(dy, given[1])


def check_maxima_alone(
    x: Tensor,
    dy: Tensor,
    bias: Tensor | None,
    spec: ProductSpec,
    sums: Tensor,
    want: Sequence[Tensor],
    amaxes: Sequence[Tensor],
) -> None:
    """They are those of a pass that encodes, and so are sums up to their order."""
    amax, dx_amax, h_amax = amaxes
    forward = gated_forward_quantized(x, bias, spec, TensorScaling(None, E4M3, amax))
    dx_scaling, h_scaling = TensorScaling(None, E5M2, dx_amax), TensorScaling(None, E4M3, h_amax)
    made = gated_backward_quantized(dy, x, bias, spec, dx_scaling, h_scaling, column_sum=True)
    is_wanted(forward, False, False)
    is_wanted(made.dx, False, False, True)
    is_wanted(made.h, False, False)
    assert [t.item() for t in amaxes] == [t.item() for t in want]
    eps = torch.finfo(x.dtype).eps
    size = sums.abs().max().item() + len(x)
    torch.testing.assert_close(made.dx.column_sum, sums, rtol=2 * eps, atol=1e-5 * size)


def check_blocks(
    f: Glu | ScalarFunction,
    x: Tensor,
    dy: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = E4M3,
    h_dtype: torch.dtype = E4M3,
    *,
    power_of_two: bool = True,
    column_sum: bool = True,
    square_cols: bool = True,
) -> None:
    """Codes and scales are those of the values that gated kernels make in fp32, bit for bit."""
    spec = product_spec(f)
    z = x.float() if bias is None else x.float() + bias.float()
    y, values = gated_forward(z, spec, None), gated_backward(dy.float(), z, spec, None, True, True)
    dx_scaling = BlockScaling(dtype, power_of_two)
    h_scaling = BlockScaling(h_dtype, power_of_two, square_cols)
    assert_same(
        gated_forward_quantized(x, bias, spec, h_scaling),
        quantize(y, BlockScaling(h_dtype, power_of_two), rows=True, cols=False),
        "forward",
    )
    want_dx = quantize(values.dx, BlockScaling(dtype, power_of_two), rows=True, cols=True)
    h_want = BlockScaling(h_dtype, power_of_two, square_cols)
    want_h = quantize(values.y, h_want, rows=False, cols=True)
    made = gated_backward_quantized(dy, x, bias, spec, dx_scaling, h_scaling, column_sum=column_sum)
    is_wanted(made.dx, True, True, column_sum)
    if column_sum and values.dx.isfinite().all():
        assert_sums(made.dx.column_sum, values.dx.double().cpu(), x.dtype)
    assert_same(made.dx._replace(column_sum=None), want_dx, "dx")
    assert_same(made.h, want_h, "h")


def assert_same(got: Codes, want: Codes, what: str) -> None:
    """Bits, but for the sign of a NaN."""
    for name, one, other in zip(Codes._fields, got, want):
        assert (one is None) == (other is None), f"{what}: {name}"
        if one is None:
            continue
        assert one.is_contiguous()
        assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{what}: {name}"
        a, b = one.float().cpu(), other.float().cpu()
        wrong = (a != b) & ~(a.isnan() & b.isnan())
        assert not wrong.any(), f"{what}: {name}: {wrong.sum()}, as at {wrong.nonzero()[0]}"


# Functions, rows and columns, dtypes of x, of dx and of h, and the dtype and
# layout of a bias.
CASES: list[tuple[Any, ...]] = [
    ("geglu", 5, 48, BF16, E5M2, E4M3, None, ""),
    ("situ", 5, 48, FP32, E5M2, E4M3, None, ""),
    ("no linear units, capped", 5, 48, FP16, E5M2, E4M3, None, ""),
    ("swiglu in blocks of 3", 5, 48, FP32, E5M2, E4M3, None, ""),
    ("swiglu in blocks of 24", 5, 48, BF16, E5M2, E4M3, None, ""),
    ("clamped in blocks of 1", 5, 48, FP16, E5M2, E4M3, None, ""),
    ("swiglu", 1, 3, BF16, E5M2, E4M3, None, ""),
    ("swiglu", 127, 65, FP32, E4M3, E4M3, None, ""),
    ("swiglu", 129, 130, FP16, E5M2, E5M2, None, ""),
    ("clamped", 130, 33, BF16, E4M3, E5M2, None, ""),
    ("no linear units", 129, 65, FP32, E5M2, E4M3, None, ""),
    ("swiglu in blocks of 8", 129, 136, BF16, E5M2, E4M3, None, ""),
    ("swiglu in blocks of 1", 129, 66, BF16, E4M3, E4M3, None, ""),
    ("gelu_erf", 129, 65, BF16, E5M2, E4M3, FP32, "contiguous"),
    ("swish", 1, 3, FP32, E5M2, E4M3, FP16, "every second column"),
    ("relu", 127, 64, FP16, E5M2, E4M3, torch.float64, "contiguous"),
    ("softplus", 3, 33, FP16, E5M2, E4M3, FP16, "every second column"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: tuple[Any, ...], device: torch.device) -> None:
    name, rows, cols, source, dtype, h_dtype, of_bias, layout = case
    f = PRODUCTS.get(name) or FUNCTIONS[name]
    x = tensor(rows, columns(f, cols), dtype=source, device=device)
    dy, bias = tensor(rows, cols, dtype=source, device=device), None
    if of_bias is not None:
        bias = tensor(1, cols, dtype=of_bias, device=device, layout=layout)[0]
    check(f, x, dy, dtype, h_dtype, bias)


@pytest.mark.parametrize(
    ("x_layout", "dy_layout"),
    [
        ("rows apart", "every second column"),
        ("transposed", "rows apart"),
        ("contiguous", "constant"),
        ("rows repeated", "transposed"),
    ],
)
def test_layouts(x_layout: str, dy_layout: str, device: torch.device) -> None:
    f = PRODUCTS["swiglu"]
    for cols in (48, 128):
        x = tensor(5, 2 * cols, dtype=BF16, device=device, layout=x_layout)
        dy = tensor(5, cols, dtype=FP32, device=device, layout=dy_layout)
        check(f, x, dy) if cols == 48 else check_blocks(f, x, dy, column_sum=False)


BLOCKS: dict[str, Glu | ScalarFunction] = {
    **{name: PRODUCTS[name] for name in ("swiglu", "geglu", "clamped", "situ", "no linear units")},
    "swiglu in blocks of 128": Glu(Swish(), None, 128),
    "relu": Glu(Relu(), None, 128),
}


@pytest.mark.parametrize(
    ("name", "rows", "cols", "source", "power_of_two", "square_cols"),
    [
        ("swiglu", 129, 256, FP32, False, True),
        ("geglu", 127, 128, FP16, False, False),
        ("clamped", 1, 128, BF16, True, False),
        ("no linear units", 129, 256, BF16, True, True),
        ("swiglu in blocks of 128", 3, 256, BF16, True, False),
    ],
    ids=str,
)
def test_blocks(
    name: str,
    rows: int,
    cols: int,
    source: torch.dtype,
    power_of_two: bool,
    square_cols: bool,
    device: torch.device,
) -> None:
    f = BLOCKS[name]
    x, dy = (uneven(rows, n, source, device) for n in (columns(f, cols), cols))
    dtype = E5M2 if rows == 129 else E4M3
    how: Any = {"power_of_two": power_of_two, "square_cols": square_cols}
    check_blocks(f, x, dy, None, dtype, **how)


@pytest.mark.parametrize("name", ["gelu_erf", "relu"])
def test_blocks_with_a_bias(name: str, device: torch.device) -> None:
    x, dy = (uneven(100, 128, BF16, device) for _ in range(2))
    check_blocks(FUNCTIONS[name], x, dy, torch.randn(128, device=device))


@pytest.mark.parametrize("interleave", [256, 32])
def test_blocks_by_their_definition(interleave: int, device: torch.device) -> None:
    """With ReLU the values of bf16 are exact in fp32, and so are all codes and scales."""
    f = Glu(Relu(), None, interleave)
    x, dy = (uneven(129, n, BF16, device) for n in (512, 256))
    a, b = f.split(x.double())
    g, gates = dy.double().view(a.shape), a.clamp_min(0.0)
    h = (gates * b).flatten(1)
    dx = torch.stack((torch.where(a > 0, g * b, 0.0), g * gates), 2).flatten(1).cpu()
    spec, how, h_how = product_spec(f), BlockScaling(E5M2, False), BlockScaling(E4M3)
    assert_blocks(h, gated_forward_quantized(x, None, spec, h_how), E4M3, True)
    made = gated_backward_quantized(dy, x, None, spec, how, h_how, column_sum=True)
    assert_blocks(dx, made.dx, E5M2, False)
    assert_blocks(h, made.h, E4M3, True)
    assert_sums(made.dx.column_sum, dx, x.dtype)


def test_blocks_of_gates_and_linear_units_together(device: torch.device) -> None:
    """64 columns of each are a block of dx; those of h are not full."""
    f = Glu(Relu())
    x, dy = (tensor(130, n, dtype=BF16, device=device) for n in (128, 64))
    h, dx = exact_gated(f, x, None, dy)
    how = BlockScaling(E4M3)
    made = gated_backward_quantized(dy, x, None, product_spec(f), how, how)
    assert_blocks(dx, made.dx, E4M3, True)
    assert_blocks(h, made.h, E4M3, True)
    with pytest.raises(RuntimeError, match="64"):
        gated_forward_quantized(x, None, product_spec(f), how)


def check_saved(
    f: Glu | ScalarFunction, x: Tensor, dy: Tensor, how: Scaling, bias: Tensor | None = None
) -> None:
    """Codes of x by their definition, h as without them, and gradients at the codes' values."""
    spec, given = product_spec(f), x.clone()
    h, codes = gated_forward_and_input(x, bias, spec, how)
    assert_same(h, gated_forward_quantized(x, bias, spec, how), "h")
    assert_same(
        codes, by_blocks_plain(x, BlockScaling(E4M3, power_of_two=False), True, False, False), "x"
    )
    assert_same(quantize_input(x), codes, "x alone")
    assert torch.equal(x, given)
    kept = [t.clone() for t in codes[:2]]
    values = dequantize(codes, len(x), FP32)
    exact_h, exact_dx = exact_gated(f, values, bias, dy)
    scale, h_scale = scale_of(exact_dx, E5M2), scale_of(exact_h, E4M3)
    dx_amax, h_amax, *alone = (torch.zeros(1, device=x.device) for _ in range(4))
    made = gated_backward_quantized(
        dy, codes, bias, spec,
        TensorScaling(x.new_tensor([scale], dtype=FP32), E5M2, dx_amax),
        TensorScaling(x.new_tensor([h_scale], dtype=FP32), E4M3, h_amax),
        column_sum=True,
    )  # fmt: skip
    is_wanted(made.dx, True, True, True)
    is_wanted(made.h, False, True)
    assert_rounded(made.dx.rows.cpu(), exact_dx, scale, "dx by rows")
    assert_rounded(made.h.cols.t().cpu(), exact_h, h_scale, "h by columns")
    assert torch.equal(bits(made.dx.rows).t(), bits(made.dx.cols))
    assert_sums(made.dx.column_sum, exact_dx, dy.dtype)
    for got, exact in ((dx_amax, exact_dx), (h_amax, exact_h)):
        torch.testing.assert_close(got.item(), exact.abs().max().item(), rtol=1e-5, atol=0.0)
    maxima = [TensorScaling(None, dtype, m) for dtype, m in zip((E5M2, E4M3), alone)]
    gated_backward_quantized(dy, codes, bias, spec, *maxima)
    assert [t.item() for t in alone] == [dx_amax.item(), h_amax.item()]
    for one, other in zip(codes[:2], kept):
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize(
    ("name", "rows", "cols", "source", "layout"),
    [
        ("swiglu", 129, 256, FP32, "rows apart"),
        ("swiglu in blocks of 128", 130, 256, BF16, "contiguous"),
        ("clamped", 127, 128, FP16, "every second column"),
        ("situ", 1, 128, FP32, "transposed"),
        ("no linear units", 9, 256, BF16, "contiguous"),
        ("gelu_erf", 129, 128, BF16, "contiguous"),
    ],
    ids=str,
)
def test_x_is_saved_as_codes(
    name: str, rows: int, cols: int, source: torch.dtype, layout: str, device: torch.device
) -> None:
    f = BLOCKS.get(name) or FUNCTIONS[name]
    x = tensor(rows, columns(f, cols), dtype=source, device=device, layout=layout)
    dy = tensor(rows, cols, dtype=source, device=device)
    bias = None if name in BLOCKS else tensor(1, cols, dtype=source, device=device)[0]
    check_saved(f, x, dy, TensorScaling(torch.full((1,), 30.0, device=device), E4M3), bias)


@pytest.mark.parametrize("name", ["no linear units", "swiglu in blocks of 128", "relu"])
def test_blocks_from_codes_of_x(name: str, device: torch.device) -> None:
    """In the dtype of dy; nothing is rounded twice in fp32."""
    f, how = BLOCKS[name], BlockScaling(E4M3)
    spec = product_spec(f)
    x, dy = (uneven(129, n, FP32, device) for n in (columns(f, 256), 256))
    h, codes = gated_forward_and_input(x, None, spec, how)
    assert_same(h, gated_forward_quantized(x, None, spec, how), "h")
    assert_blocks(x, codes, E4M3, False)
    values = dequantize(codes, 129, FP32)
    given = TensorScaling(torch.ones(1, device=device), E4M3)
    for scaling in (how, given) if name == "relu" else (how,):  # which is exact
        made, want = (
            gated_backward_quantized(dy, saved, None, spec, scaling, scaling)
            for saved in (codes, values)
        )
        assert_same(made.dx, want.dx, "dx")
        assert_same(made.h, want.h, "h")


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_takes_its_block_of_x_alone(value: float, device: torch.device) -> None:
    f, scale = PRODUCTS["swiglu"], torch.full((1,), 30.0, device=device)
    x, dy = torch.ones(130, 512, device=device), torch.ones(130, 256, device=device)
    x[129, 17] = x[3, 390] = value
    spec, how = product_spec(f), TensorScaling(scale, E4M3)
    _, codes = gated_forward_and_input(x, None, spec, how)
    made = gated_backward_quantized(dy, codes, None, spec, how, how)
    gone = torch.zeros(130, 512, dtype=torch.bool)
    gone[129, :128] = gone[3, 384:] = True
    values = dequantize(codes, 130, FP32).cpu()
    assert torch.equal(values.isnan(), gone)
    both = gone[:, :256] | gone[:, 256:]
    h = made.h.cols.t()[:130].float().cpu()
    assert torch.equal(h.isnan(), both)
    # da = g b u'(a), db = g u(a)
    dx = made.dx.rows[:130].float().cpu().isnan()
    assert torch.equal(dx[:, :256], both)
    assert torch.equal(dx[:, 256:], gone[:, :256])


def test_what_fills_no_blocks_is_not_saved_as_codes(device: torch.device) -> None:
    how = TensorScaling(torch.ones(1, device=device), E4M3)
    for f, cols in (
        (PRODUCTS["swiglu"], 64),
        (PRODUCTS["swiglu"], 192),
        (Glu(Swish(), None, 64), 128),
        (PRODUCTS["no linear units"], 64),
    ):
        x, dy = torch.ones(2, columns(f, cols), device=device), torch.ones(2, cols, device=device)
        with pytest.raises(AssertionError):
            gated_forward_and_input(x, None, product_spec(f), how)
        codes = Codes(x.to(E4M3), None, None, None, None)
        with pytest.raises(AssertionError):
            gated_backward_quantized(dy, codes, None, product_spec(f), how, how)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_shows(value: float, device: torch.device) -> None:
    f, one = PRODUCTS["swiglu"], torch.ones(1, device=device)
    x, dy = torch.ones(130, 32, device=device), torch.ones(130, 16, device=device)
    x[129, 17] = dy[3, 5] = value
    spec = product_spec(f)
    for s in (one, None):
        amax, dx_amax, h_amax = (torch.zeros(1, device=device) for _ in range(3))
        forward = gated_forward_quantized(x, None, spec, TensorScaling(s, E4M3, amax))
        made = gated_backward_quantized(
            dy, x, None, spec, TensorScaling(s, E5M2, dx_amax), TensorScaling(s, E4M3, h_amax)
        )
        want = torch.tensor([value])
        for got in (amax, dx_amax, h_amax):
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
        if s is None:
            continue
        code = torch.tensor(value if math.isnan(value) else 448.0)
        for got in (forward.rows[129, 1], made.h.cols[1, 129]):
            torch.testing.assert_close(got.float().cpu(), code, rtol=0, atol=0, equal_nan=True)
        code = torch.tensor(value if math.isnan(value) else 57344.0)
        torch.testing.assert_close(
            made.dx.rows[3, 5].float().cpu(), code, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_takes_its_blocks_alone(value: float, device: torch.device) -> None:
    x, dy = torch.ones(130, 256, device=device), torch.ones(130, 128, device=device)
    x[129, 17] = x[3, 130] = dy[5, 6] = value
    check_blocks(PRODUCTS["swiglu"], x, dy)
    bias = torch.zeros(128, device=device)
    bias[7] = value
    check_blocks(FUNCTIONS["gelu_tanh"], x[:3, :128], dy[:3], bias)


def test_padding_is_0_whatever_the_scale_and_the_function(device: torch.device) -> None:
    nan = torch.full((1,), math.nan, device=device)
    given = torch.full((16,), math.nan, device=device)
    for f, bias in (
        (PRODUCTS["swiglu"], None),
        (PRODUCTS["clamped"], None),  # its linear units are 1 at 0
        (FUNCTIONS["softplus"], None),
        (FUNCTIONS["gelu_erf"], given),
    ):
        x, dy = torch.ones(3, columns(f, 16), device=device), torch.ones(3, 16, device=device)
        how, spec = TensorScaling(nan, E4M3), product_spec(f)
        forward = gated_forward_quantized(x, bias, spec, how)
        made = gated_backward_quantized(dy, x, bias, spec, how, how)
        for codes in (forward.rows, made.dx.rows, made.dx.cols.t(), made.h.cols.t()):
            assert codes[:3].float().isnan().all()
            assert not codes[3:].float().count_nonzero()


def test_no_rows(device: torch.device) -> None:
    f, scale = PRODUCTS["swiglu"], torch.full((1,), 4.0, device=device)
    x, dy = torch.empty(0, 512, device=device), torch.empty(0, 256, device=device)
    amax = torch.ones(1, device=device)
    spec, h_how = product_spec(f), TensorScaling(scale, E4M3, amax)
    forward, saved = gated_forward_and_input(x, None, spec, h_how)
    how = TensorScaling(scale, E5M2, amax)
    assert [tuple(t.shape) for t in saved[:2]] == [(0, 512), (4, 0)]
    gated_backward_quantized(dy, saved, None, spec, how, h_how, column_sum=True)
    made = gated_backward_quantized(dy, x, None, spec, how, h_how, column_sum=True)
    shapes = [tuple(t.shape) for t in (forward.rows, made.dx.rows, made.dx.cols, made.h.cols)]
    assert shapes == [(0, 256), (0, 512), (512, 0), (256, 0)]
    assert made.dx.row_scale.tolist() == forward.row_scale.tolist() == [0.25]
    assert made.dx.column_sum.tolist() == [0.0] * 512
    assert amax.tolist() == [1.0]
    how = BlockScaling(E4M3)
    forward = gated_forward_quantized(x, None, spec, how)
    made = gated_backward_quantized(dy, x, None, spec, how, how)
    shapes = [tuple(t.shape) for t in (*forward[:2], *made.dx[:4], *made.h[2:4])]
    assert shapes == [
        (0, 256), (2, 0), (0, 512), (4, 0), (512, 0), (0, 512), (256, 0), (0, 256)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "saved", "powers"),
    [("swiglu", True, (False, True)), ("no linear units", False, (True, False))],
)
def test_scales_from_largest_values(
    name: str, saved: bool, powers: tuple[bool, bool], device: torch.device
) -> None:
    f = PRODUCTS[name]
    spec, amaxes = product_spec(f), torch.tensor([[3.7], [0.3]], device=device)
    x = torch.randn(129, columns(f, 128), device=device).to(BF16)
    dy = torch.randn(129, 128, device=device).to(BF16)
    measured = [
        MeasuredScaling(amax, dtype, power)
        for amax, dtype, power in zip(amaxes, (E5M2, E4M3), powers)
    ]
    given = [
        TensorScaling(scale_for(m.amax, m.dtype, power_of_two=m.power_of_two), m.dtype)
        for m in measured
    ]
    made = []
    for dx, h in (measured, given):
        call = gated_forward_and_input if saved else gated_forward_quantized
        forward = call(x, None, spec, h)
        kept = forward.x if saved else x
        grads = gated_backward_quantized(dy, kept, None, spec, dx, h, column_sum=True)
        made.append([forward.h if saved else forward, grads.dx, grads.h])
    for what, got, want in zip(("forward", "dx", "h"), *made):
        assert_same(got, want, what)
    assert_scales(made[0][0].row_scale, inverse(given[1].scale.cpu()))
    assert_scales(made[0][1].col_scale, inverse(given[0].scale.cpu()))
    assert amaxes.tolist() == torch.tensor([[3.7], [0.3]]).tolist(), "they are only read"


def test_scalings_of_two_kinds_are_refused(device: torch.device) -> None:
    f, one = PRODUCTS["swiglu"], torch.ones(1, device=device)
    x, dy = torch.ones(2, 256, device=device), torch.ones(2, 128, device=device)
    given, alone, blocks = TensorScaling(one, E4M3), TensorScaling(None, E4M3), BlockScaling(E4M3)
    measured = MeasuredScaling(one, E4M3)
    for pair in ((given, alone), (given, blocks), (blocks, alone), (given, measured)):
        for dx, h in (pair, pair[::-1]):
            with pytest.raises(AssertionError):
                gated_backward_quantized(dy, x, None, product_spec(f), dx, h)
    bias = torch.ones(128, device=device)
    with pytest.raises(AssertionError):
        gated_forward_quantized(x, bias, product_spec(f), given)
    with pytest.raises(AssertionError):
        gated_backward_quantized(dy, x, bias, product_spec(f), given, given)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 1040), (2048, 3584)], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "geglu", "clamped", "no linear units"])
def test_the_transpose_is_that_of_the_rows_on_a_gpu(name: str, shape: tuple[int, int]) -> None:
    """An assembler may compile what is both stored and packed into words wrongly."""
    f, scale = PRODUCTS[name], torch.full((1,), 30.0, device="cuda")
    for source in (BF16, FP32):
        x = torch.randn(shape[0], columns(f, shape[1]), device="cuda").to(source)
        dy = torch.randn(shape, device="cuda").to(source)
        spec = product_spec(f)
        how, h_how = TensorScaling(scale, E5M2), TensorScaling(scale, E4M3)
        dx, h = gated_backward_quantized(dy, x, None, spec, how, h_how)
        assert torch.equal(bits(dx.rows).t(), bits(dx.cols))
        forward = gated_forward_quantized(x, None, spec, h_how)
        assert torch.equal(bits(forward.rows).t(), bits(h.cols))
        if shape[1] % 128 == 0:
            check_blocks(f, x, dy)

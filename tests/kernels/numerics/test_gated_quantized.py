from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from opfuser.kernels.gated import Glu, product_spec
from opfuser.kernels.gated_quantized import gated_backward_quantized, gated_forward_quantized
from opfuser.kernels.quantize import Codes
from opfuser.kernels.scalar import ScalarFunction
from tests.kernels.activations import PRODUCTS, columns, expected_gated, tensor
from tests.kernels.codes import E4M3, E5M2, TOP, assert_scales, inverse, padded, values

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


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def scale_of(exact: Tensor, dtype: torch.dtype) -> float:
    return TOP[dtype] / max(exact.abs().max().item(), 1e-3)


def check(
    f: Glu | ScalarFunction,
    x: Tensor,
    dy: Tensor,
    dtype: torch.dtype = E5M2,
    h_dtype: torch.dtype = E4M3,
) -> None:
    spec, device = product_spec(f), x.device
    given = x.clone(), dy.clone()
    h, dx, _ = (t.cpu() for t in expected_gated(f, x, dy, None, torch.float64))
    scale, h_scale = scale_of(dx, dtype), scale_of(h, h_dtype)
    s, hs = torch.tensor([scale], device=device), torch.tensor([h_scale], device=device)
    amax, dx_amax, h_amax = (torch.zeros(1, device=device) for _ in range(3))
    forward = gated_forward_quantized(x, spec, hs, h_dtype, amax=amax)
    made = gated_backward_quantized(dy, x, spec, s, dtype, hs, h_dtype, dx_amax=dx_amax)
    again = gated_backward_quantized(dy, x, spec, s, dtype, hs, h_dtype, h_amax=h_amax)
    for codes, wanted in (
        (forward, (True, False)),
        (made.dx, (True, True)),
        (made.h, (False, True)),
    ):
        is_there = [t is not None for t in codes]
        assert is_there == [wanted[0], wanted[0], wanted[1], wanted[1], False]
    assert_rounded(forward.rows.cpu(), h, h_scale, "h by rows")
    assert_rounded(made.dx.rows.cpu(), dx, scale, "dx by rows")
    assert_rounded(made.h.cols.t().cpu(), h, h_scale, "h by columns")
    assert torch.equal(bits(made.dx.rows).t(), bits(made.dx.cols))
    for one, other in zip((*made.dx, *made.h), (*again.dx, *again.h)):
        if one is not None:
            assert one.is_contiguous()
            assert torch.equal(one.float(), other.float()), "amax changes nothing"
    for got, want in ((forward.row_scale, hs), (made.h.col_scale, hs)):
        assert_scales(got, inverse(want.cpu()))
    for got in (made.dx.row_scale, made.dx.col_scale):
        assert_scales(got, inverse(s.cpu()))
    for got, exact in ((amax, h), (dx_amax, dx), (h_amax, h)):
        torch.testing.assert_close(got.item(), exact.abs().max().item(), rtol=1e-5, atol=0.0)
    assert torch.equal(x, given[0])
    assert torch.equal(dy, given[1])


@pytest.mark.parametrize(
    ("name", "source"),
    [*zip(PRODUCTS, itertools.cycle([torch.bfloat16, torch.float32, torch.float16]))],
    ids=str,
)
def test_products(name: str, source: torch.dtype, device: torch.device) -> None:
    f = PRODUCTS[name]
    x = tensor(5, columns(f, 48), dtype=source, device=device)
    check(f, x, tensor(5, 48, dtype=source, device=device))


@pytest.mark.parametrize(
    ("name", "rows", "cols", "source", "dtype", "h_dtype"),
    [
        ("swiglu", 1, 3, torch.bfloat16, E5M2, E4M3),
        ("swiglu", 127, 65, torch.float32, E4M3, E4M3),
        ("swiglu", 128, 128, torch.bfloat16, E5M2, E4M3),
        ("swiglu", 129, 130, torch.float16, E5M2, E5M2),
        ("clamped", 130, 33, torch.bfloat16, E4M3, E5M2),
        ("no linear units", 129, 65, torch.float32, E5M2, E4M3),
        ("swiglu in blocks of 8", 129, 136, torch.bfloat16, E5M2, E4M3),
        ("swiglu in blocks of 1", 129, 66, torch.bfloat16, E4M3, E4M3),
    ],
    ids=str,
)
def test_shapes(
    name: str,
    rows: int,
    cols: int,
    source: torch.dtype,
    dtype: torch.dtype,
    h_dtype: torch.dtype,
    device: torch.device,
) -> None:
    f = PRODUCTS[name]
    x = tensor(rows, columns(f, cols), dtype=source, device=device)
    check(f, x, tensor(rows, cols, dtype=source, device=device), dtype, h_dtype)


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
    x = tensor(5, 96, dtype=torch.bfloat16, device=device, layout=x_layout)
    check(
        PRODUCTS["swiglu"], x, tensor(5, 48, dtype=torch.float32, device=device, layout=dy_layout)
    )


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_shows(value: float, device: torch.device) -> None:
    f, one = PRODUCTS["swiglu"], torch.ones(1, device=device)
    x, dy = torch.ones(130, 32, device=device), torch.ones(130, 16, device=device)
    x[129, 17] = dy[3, 5] = value
    spec = product_spec(f)
    amax, dx_amax, h_amax = (torch.zeros(1, device=device) for _ in range(3))
    forward = gated_forward_quantized(x, spec, one, E4M3, amax=amax)
    made = gated_backward_quantized(
        dy, x, spec, one, E5M2, one, E4M3, dx_amax=dx_amax, h_amax=h_amax
    )
    want = torch.tensor([value])
    for got in (amax, dx_amax, h_amax):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
    code = torch.tensor(value if math.isnan(value) else 448.0)
    for got in (forward.rows[129, 1], made.h.cols[1, 129]):
        torch.testing.assert_close(got.float().cpu(), code, rtol=0, atol=0, equal_nan=True)
    code = torch.tensor(value if math.isnan(value) else 57344.0)
    torch.testing.assert_close(
        made.dx.rows[3, 5].float().cpu(), code, rtol=0, atol=0, equal_nan=True
    )


def test_padding_is_0_whatever_the_scale_and_the_function(device: torch.device) -> None:
    nan = torch.full((1,), math.nan, device=device)
    for name in ("swiglu", "clamped"):  # the second one's linear units are 1 at 0
        f = PRODUCTS[name]
        x, dy = torch.ones(3, 32, device=device), torch.ones(3, 16, device=device)
        forward = gated_forward_quantized(x, product_spec(f), nan, E4M3)
        made = gated_backward_quantized(dy, x, product_spec(f), nan, E5M2, nan, E4M3)
        for codes in (forward.rows, made.dx.rows, made.dx.cols.t(), made.h.cols.t()):
            assert codes[:3].float().isnan().all()
            assert not codes[3:].float().count_nonzero()


def test_no_rows(device: torch.device) -> None:
    f, scale = PRODUCTS["swiglu"], torch.full((1,), 4.0, device=device)
    x, dy = torch.empty(0, 32, device=device), torch.empty(0, 16, device=device)
    amax = torch.ones(1, device=device)
    forward = gated_forward_quantized(x, product_spec(f), scale, E4M3, amax=amax)
    made = gated_backward_quantized(
        dy, x, product_spec(f), scale, E5M2, scale, E4M3, dx_amax=amax, h_amax=amax
    )
    shapes = [tuple(t.shape) for t in (forward.rows, made.dx.rows, made.dx.cols, made.h.cols)]
    assert shapes == [(0, 16), (0, 32), (32, 0), (16, 0)]
    assert made.dx.row_scale.tolist() == forward.row_scale.tolist() == [0.25]
    assert amax.tolist() == [1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 1040), (2048, 3584)], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "geglu", "clamped"])
def test_the_transpose_is_that_of_the_rows_on_a_gpu(name: str, shape: tuple[int, int]) -> None:
    """An assembler may compile what is both stored and packed into words wrongly."""
    f, scale = PRODUCTS[name], torch.full((1,), 30.0, device="cuda")
    for source in (torch.bfloat16, torch.float32):
        x = torch.randn(shape[0], 2 * shape[1], device="cuda").to(source)
        dy = torch.randn(shape, device="cuda").to(source)
        spec = product_spec(f)
        dx, h = gated_backward_quantized(dy, x, spec, scale, E5M2, scale, E4M3)
        assert torch.equal(bits(dx.rows).t(), bits(dx.cols))
        forward: Codes = gated_forward_quantized(x, spec, scale, E4M3)
        assert torch.equal(bits(forward.rows).t(), bits(h.cols))

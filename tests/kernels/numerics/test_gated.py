from __future__ import annotations

import itertools

import pytest
import torch

from opfuser.kernels.functions import SquaredRelu
from opfuser.kernels.gated import gated_backward, gated_backward_, gated_forward
from opfuser.kernels.gated_plain import product_spec
from tests.kernels.activations import (
    PAIRS_OF_DTYPES,
    PAIRS_OF_LAYOUTS,
    PRODUCTS,
    check_gated,
    columns,
    tensor,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SWIGLU, IN_FOURS = PRODUCTS["swiglu"], PRODUCTS["swiglu in blocks of 4"]
SHAPES = [(1, 3), (1, 1200), (3, 129), (2, 3, 24), (130, 9), (6,)]

# A GPU is silent about overflow and infinities; the interpreter's numpy is not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*zip(PRODUCTS, itertools.cycle(DTYPES)), *(("swiglu", dtype) for dtype in DTYPES)],
    ids=str,
)
def test_values_and_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    f = PRODUCTS[name]
    x = tensor(5, columns(f, 48), dtype=dtype, device=device)
    dy, scales = tensor(5, 48, dtype=dtype, device=device), tensor(5, dtype=dtype, device=device)
    check_gated(f, x, dy, scales, "with scales")
    check_gated(f, x, dy, None, "without")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *zip(["swiglu"] * 6, SHAPES),
        *zip(itertools.cycle(["swiglu in blocks of 1", "no linear units"]), SHAPES),
        ("swiglu in blocks of 3", (2, 3, 24)),
        ("swiglu in blocks of 3", (1, 1200)),
    ],
    ids=str,
)
def test_shapes(name: str, shape: tuple[int, ...], device: torch.device) -> None:
    f, (*rows, cols) = PRODUCTS[name], shape
    for dtype, with_scales in ((torch.float32, False), (torch.bfloat16, True)):
        x = tensor(*rows, columns(f, cols), dtype=dtype, device=device)
        dy = tensor(*shape, dtype=dtype, device=device)
        scales = tensor(*rows, dtype=dtype, device=device) if with_scales else None
        check_gated(f, x, dy, scales, f"{dtype}, scales {with_scales}")


@pytest.mark.parametrize(("x_layout", "dy_layout"), PAIRS_OF_LAYOUTS)
def test_layouts(x_layout: str, dy_layout: str, device: torch.device) -> None:
    for f, rows, with_scales in (
        (SWIGLU, (5,), True),
        (IN_FOURS, (2, 3), True),
        (SWIGLU, (2, 3), False),
        (IN_FOURS, (5,), False),
    ):
        x = tensor(*rows, 48, dtype=torch.float32, device=device, layout=x_layout)
        dy = tensor(*rows, 24, dtype=torch.float32, device=device, layout=dy_layout)
        scales = tensor(*rows, dtype=torch.float32, device=device, layout=x_layout)
        check_gated(f, x, dy, scales if with_scales else None, f"{f}, {rows}")


@pytest.mark.parametrize("with_scales", [False, True])
def test_only_what_is_wanted(with_scales: bool, device: torch.device) -> None:
    x, dy, scales = (torch.randn(s, device=device) for s in ((7, 48), (7, 24), (7,)))
    given = product_spec(SWIGLU), scales if with_scales else None
    every = gated_backward(dy, x, *given, True, True)
    for want_dx, want_y, want_dscales in itertools.product([False, True], repeat=3):
        some = gated_backward(dy, x, *given, want_dx, want_y, want_dscales)
        wants = want_dx, want_dscales and with_scales, want_y
        assert tuple(got is not None for got in some) == wants
        for got, want in zip(some, every):
            if got is not None:
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "cols"),
    [
        ("swiglu", 24),
        ("swiglu", 1304),
        ("swiglu in blocks of 1", 1304),
        ("swiglu in blocks of 8", 1304),
    ],
)
def test_in_place(name: str, cols: int, device: torch.device) -> None:
    f = PRODUCTS[name]
    x, dy = torch.randn(6, 2 * cols, device=device), torch.randn(6, cols, device=device)
    for scales in (None, torch.randn(6, device=device)):
        want = gated_backward(dy, x, product_spec(f), scales, True, True)
        own = x.clone()
        got = gated_backward_(dy, own, product_spec(f), scales, True)
        assert got.dx.data_ptr() == own.data_ptr()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_not_in_place_where_x_is_part_of_another_tensor(device: torch.device) -> None:
    whole = torch.randn(6, 64, device=device)
    before = whole.clone()
    x, dy = whole[:, :48], torch.randn(6, 24, device=device)
    dx = gated_backward_(dy, x, product_spec(SWIGLU), None, False).dx
    assert torch.equal(whole, before)
    want = gated_backward(dy, x, product_spec(SWIGLU), None, True, False).dx
    assert torch.equal(dx, want)


def test_row_sums_lose_nothing(device: torch.device) -> None:
    x = torch.ones(2, 8192, dtype=torch.bfloat16, device=device)
    scales = torch.ones(2, dtype=torch.bfloat16, device=device)
    spec = product_spec(SquaredRelu())
    dscales = gated_backward(x, x, spec, scales, False, False).dscales
    assert dscales.tolist() == [8192, 8192]


@pytest.mark.parametrize("shape", [(0, 24), (3, 0), (2, 0, 24)])
def test_nothing_to_do(shape: tuple[int, ...], device: torch.device) -> None:
    *rows, cols = shape
    x, dy = torch.randn(*rows, 2 * cols, device=device), torch.randn(shape, device=device)
    scales = torch.randn(*rows, device=device)
    assert gated_forward(x, product_spec(SWIGLU), scales).shape == shape
    dx, dscales, y = gated_backward(dy, x, product_spec(SWIGLU), scales, True, True)
    assert (dx.shape, dscales.shape, y.shape) == (x.shape, scales.shape, dy.shape)
    assert not dscales.count_nonzero()


@pytest.mark.parametrize(("dtype", "other"), PAIRS_OF_DTYPES, ids=str)
def test_dtypes_in_any_mixture(
    dtype: torch.dtype, other: torch.dtype, device: torch.device
) -> None:
    x = tensor(5, 48, dtype=dtype, device=device)
    dy, scales = tensor(5, 24, dtype=other, device=device), tensor(5, dtype=other, device=device)
    check_gated(SWIGLU, x, dy, scales)
    check_gated(SWIGLU, x, dy, None)

from __future__ import annotations

import itertools

import pytest
import torch

from opfuser.kernels.functions import SquaredRelu, Swish
from opfuser.kernels.gated import (
    Glu,
    gated_backward,
    gated_backward_,
    gated_forward,
    product_spec,
)
from opfuser.kernels.scalar import ScalarFunction
from tests.kernels.activations import (
    LAYOUTS,
    PRODUCTS,
    check_gated,
    columns,
    tensor,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [pytest.param(f, id=name) for name, f in PRODUCTS.items()]
SWIGLU = Glu(Swish())

# A GPU is silent about overflow and infinities; the interpreter's numpy is not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("f", CASES)
def test_values_and_gradients(
    f: Glu | ScalarFunction, dtype: torch.dtype, device: torch.device
) -> None:
    x = tensor(5, columns(f, 48), dtype=dtype, device=device)
    dy, scales = tensor(5, 48, dtype=dtype, device=device), tensor(5, dtype=dtype, device=device)
    check_gated(f, x, dy, scales, "with scales")
    check_gated(f, x, dy, None, "without")


@pytest.mark.parametrize("f", [SWIGLU, Glu(Swish(), None, 1), Glu(Swish(), None, 3), SquaredRelu()])
@pytest.mark.parametrize("shape", [(1, 3), (1, 1200), (3, 129), (2, 3, 24), (130, 9), (6,)])
def test_shapes(f: Glu | ScalarFunction, shape: tuple[int, ...], device: torch.device) -> None:
    if isinstance(f, Glu) and shape[-1] % (f.interleave or 1):
        shape = (*shape[:-1], 3 * shape[-1])
    *rows, cols = shape
    for dtype in (torch.float32, torch.bfloat16):
        x = tensor(*rows, columns(f, cols), dtype=dtype, device=device)
        dy = tensor(*shape, dtype=dtype, device=device)
        check_gated(f, x, dy, tensor(*rows, dtype=dtype, device=device), "with scales")
        check_gated(f, x, dy, None, "without")


@pytest.mark.parametrize("f", [SWIGLU, Glu(Swish(), None, 4)])
@pytest.mark.parametrize("dy_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_layouts(f: Glu, x_layout: str, dy_layout: str, device: torch.device) -> None:
    for rows in ((5,), (2, 3)):
        x = tensor(*rows, 48, dtype=torch.float32, device=device, layout=x_layout)
        dy = tensor(*rows, 24, dtype=torch.float32, device=device, layout=dy_layout)
        scales = tensor(*rows, dtype=torch.float32, device=device, layout=x_layout)
        check_gated(f, x, dy, scales, f"{rows}, with scales")
        check_gated(f, x, dy, None, f"{rows}")


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
def test_only_what_is_wanted(wanted: tuple[bool, bool, bool], device: torch.device) -> None:
    want_dx, want_y, want_dscales = wanted
    x, dy, scales = (torch.randn(s, device=device) for s in ((7, 48), (7, 24), (7,)))
    for given in (scales, None):
        every = gated_backward(dy, x, product_spec(SWIGLU), given, True, True)
        some = gated_backward(dy, x, product_spec(SWIGLU), given, want_dx, want_y, want_dscales)
        wants = want_dx, want_dscales and given is not None, want_y
        for got, want, is_wanted in zip(some, every, wants):
            assert (got is not None) == is_wanted
            if got is not None:
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("f", [SWIGLU, Glu(Swish(), None, 1), Glu(Swish(), None, 8)])
@pytest.mark.parametrize("cols", [24, 1304])
def test_in_place(f: Glu, cols: int, device: torch.device) -> None:
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


@pytest.mark.parametrize("other", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_dtypes_in_any_mixture(
    dtype: torch.dtype, other: torch.dtype, device: torch.device
) -> None:
    x = tensor(5, 48, dtype=dtype, device=device)
    dy, scales = tensor(5, 24, dtype=other, device=device), tensor(5, dtype=other, device=device)
    check_gated(SWIGLU, x, dy, scales)
    check_gated(SWIGLU, x, dy, None)

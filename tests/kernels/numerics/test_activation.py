from __future__ import annotations

import itertools
import math

import pytest
import torch

from opfuser.kernels import tiling
from opfuser.kernels.activation import activation_backward, activation_forward
from opfuser.kernels.capped_functions import ClampedSwish, ShiftedClamp
from opfuser.kernels.functions import Relu, Swish
from opfuser.kernels.launch import recorded, runs
from opfuser.kernels.scalar import ScalarFunction
from opfuser.torch_internals import CLAMP_PASSES_AT_LIMITS
from tests.kernels.activations import (
    FUNCTIONS,
    PAIRS_OF_DTYPES,
    PAIRS_OF_LAYOUTS,
    check_activation,
    tensor,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_DTYPES = [*DTYPES, torch.float64]
each_function = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)

# A GPU is silent about overflow and infinities; the interpreter's numpy is not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# What functions compute is fp32 in any case; of a few, all dtypes.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*zip(FUNCTIONS, itertools.cycle(DTYPES)), *(("gelu_tanh", dtype) for dtype in DTYPES)],
    ids=str,
)
def test_values_and_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    f, x = FUNCTIONS[name], tensor(5, 37, dtype=dtype, device=device)
    dy, bias = torch.randn_like(x), torch.randn(37, device=device).to(dtype)
    check_activation(f, x, dy, bias, "with bias")
    check_activation(f, x, dy, None, "without")


@each_function
def test_the_whole_range(f: ScalarFunction, device: torch.device) -> None:
    ends = torch.logspace(-30, 1.5, 400)
    x = torch.cat((-ends, torch.zeros(1), ends, torch.linspace(-4, 4, 700))).to(device)
    check_activation(f, x, torch.ones_like(x), None)


@each_function
def test_small_values_keep_their_digits(f: ScalarFunction, device: torch.device) -> None:
    x = torch.logspace(-15, 0, 200, device=device)
    x = torch.cat((-x, x))
    y = activation_forward(x, f.spec, None)
    torch.testing.assert_close(y.double(), f.reference(x.double()), rtol=1e-6, atol=0)


@each_function
def test_large_inputs_give_the_asymptotes(f: ScalarFunction, device: torch.device) -> None:
    for dtype in DTYPES:
        x = torch.tensor([-2e4, -200.0, 0.0, 200.0, 2e4], dtype=dtype, device=device)
        y = activation_forward(x, f.spec, None)
        dx = activation_backward(torch.ones_like(x), x, f.spec, None, True, False, False).dx
        x64 = x.double().requires_grad_()
        exact = f.reference(x64)
        (dexact,) = torch.autograd.grad(exact.sum(), x64)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y, exact.detach().to(dtype), rtol=eps, atol=eps)
        torch.testing.assert_close(dx, dexact.to(dtype), rtol=eps, atol=eps)


@each_function
def test_nan_comes_out(f: ScalarFunction, device: torch.device) -> None:
    x = torch.tensor([math.nan, 1.0], device=device)
    y = activation_forward(x, f.spec, None)
    assert y.isnan().tolist() == [True, False]


def test_flat_parts_stop_infinite_gradients(device: torch.device) -> None:
    x = torch.tensor([-1.0, 0.0, 1.0], device=device)
    dy = torch.full_like(x, math.inf)
    dx = activation_backward(dy, x, Relu().spec, None, True, False, False).dx
    assert dx.tolist() == [0, 0, math.inf]


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [*((dtype, 0.75) for dtype in ALL_DTYPES), (torch.float32, 0.1), (torch.float64, 0.1)],
    ids=str,
)
def test_clamps_pass_at_their_limits_what_torch_passes(
    dtype: torch.dtype, limit: float, device: torch.device
) -> None:
    at = torch.tensor([limit, -limit], dtype=dtype, device=device)
    beyond = at
    for _ in range(1 if runs(at) else 3):  # plain torch divides by the limit
        beyond = torch.nextafter(beyond, 2 * at)
    x = torch.cat((at, beyond))
    dy = torch.ones_like(x)
    z = x.detach().requires_grad_()
    for f, clamped in (
        (ClampedSwish(1.0, limit), torch.clamp(z, max=limit)),
        (ShiftedClamp(limit, 1.0), torch.clamp(z, -limit, limit)),
    ):
        passes = torch.autograd.grad(clamped, z, dy)[0].ne(0)
        assert passes[0] == CLAMP_PASSES_AT_LIMITS
        dx = activation_backward(dy, x, f.spec, None, True, False, False).dx
        assert dx.ne(0).tolist() == passes.tolist()
        y = f.reference(z)
        assert torch.autograd.grad(y, z, dy)[0].ne(0).tolist() == passes.tolist()


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (3, 130), (2, 3, 24), (300, 20), (7,)])
def test_shapes(shape: tuple[int, ...], device: torch.device) -> None:
    for dtype, with_bias in ((torch.float32, True), (torch.bfloat16, False)):
        x = tensor(*shape, dtype=dtype, device=device)
        bias = torch.randn(shape[-1], device=device).to(dtype) if with_bias else None
        check_activation(Swish(), x, torch.randn_like(x), bias, f"{dtype}")


@pytest.mark.parametrize(("x_layout", "dy_layout"), PAIRS_OF_LAYOUTS)
def test_layouts(x_layout: str, dy_layout: str, device: torch.device) -> None:
    for shape, with_bias in (((5, 24), False), ((2, 3, 24), True), ((2, 3, 24), False)):
        x = tensor(*shape, dtype=torch.float32, device=device, layout=x_layout)
        dy = tensor(*shape, dtype=torch.float32, device=device, layout=dy_layout)
        bias = torch.randn(24, device=device) if with_bias else None
        check_activation(Swish(), x, dy, bias, f"{shape}, bias {with_bias}")
    x, dy = torch.randn(2, 9, 2, device=device).select(-1, 0)
    check_activation(Swish(), x, dy, torch.randn(9, device=device), "vectors with gaps")


@pytest.mark.parametrize("with_bias", [False, True])
def test_only_what_is_wanted(with_bias: bool, device: torch.device) -> None:
    x, dy = torch.randn(2, 70, 24, device=device)
    bias = torch.randn(24, device=device) if with_bias else None
    every = activation_backward(dy, x, Swish().spec, bias, True, True, True)
    for wanted in itertools.product([False, True], repeat=3):
        some = activation_backward(dy, x, Swish().spec, bias, *wanted)
        assert tuple(got is not None for got in some) == wanted
        for got, want in zip(some, every):
            if got is not None:
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "slices"), [(90, 1), (190, 2), (200, 3), (800, 8)])
def test_partial_sums_of_any_number_of_slices(
    rows: int, slices: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for every 96 rows, but no more than there are programs for each of two blocks."""
    monkeypatch.setattr(tiling, "multiprocessors", lambda x: 1)
    x = tensor(rows, 130, dtype=torch.float32, device=device)
    with recorded() as noted:
        activation_backward(x, x, Relu().spec, None, True, True, False)
    assert noted[0].ints[-1] == slices
    check_activation(Relu(), x, torch.randn_like(x), None)


def test_sums_lose_nothing(device: torch.device) -> None:
    x = torch.ones(5000, 8, dtype=torch.bfloat16, device=device)
    db = activation_backward(x, x, Relu().spec, None, True, True, False).db
    assert db.tolist() == [torch.tensor(5000.0).bfloat16().item()] * 8


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int], device: torch.device) -> None:
    x, bias = torch.randn(shape, device=device), torch.randn(shape[1], device=device)
    assert activation_forward(x, Swish().spec, bias).shape == shape
    for b in (bias, None):
        dx, db, y = activation_backward(x, x, Swish().spec, b, True, True, True)
        assert dx.shape == y.shape == shape
        assert db.tolist() == [0] * shape[1]


def test_a_scalar(device: torch.device) -> None:
    x = torch.tensor(0.5, device=device)
    y = activation_forward(x, Swish().spec, None)
    dx = activation_backward(x, x, Swish().spec, None, True, False, False).dx
    assert y.shape == dx.shape == ()
    torch.testing.assert_close(y, torch.nn.functional.silu(x))


@pytest.mark.parametrize(("dtype", "other"), PAIRS_OF_DTYPES, ids=str)
def test_dtypes_in_any_mixture(
    dtype: torch.dtype, other: torch.dtype, device: torch.device
) -> None:
    x = tensor(5, 24, dtype=dtype, device=device)
    dy, bias = tensor(2, 5, 24, dtype=other, device=device), torch.randn(24).to(device, other)
    check_activation(Swish(), x, dy[0], bias)
    check_activation(Swish(), x, dy[1], None)

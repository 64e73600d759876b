from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser import (
    GEGLU,
    GLU,
    QGEGLU,
    ClampedSwiGLU,
    ReGLU,
    Sequential,
    SiTUGLU,
    SReGLU,
    SwiGLU,
)
from opfuser.errors import ArgumentError, InputError, NotSupportedError, OpKwargsError
from opfuser.kernels.cpu_blocks import BLOCK
from opfuser.testing import check_op
from tests.kernels.activations import assert_rounded_once

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SWIGLU_FAMILY = [SwiGLU, SiTUGLU, ClampedSwiGLU]


def situ(a: Tensor, b: Tensor) -> Tensor:
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)


def clamped(a: Tensor, b: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + offset)


CASES: dict[str, tuple[Any, Any]] = {
    "glu": (GLU(), lambda a, b: torch.sigmoid(a) * b),
    "geglu": (GEGLU(), lambda a, b: F.gelu(a, approximate="tanh") * b),
    "qgeglu": (QGEGLU(), lambda a, b: a * torch.sigmoid(1.702 * a) * b),
    "reglu": (ReGLU(), lambda a, b: F.relu(a) * b),
    "sreglu": (SReGLU(), lambda a, b: F.relu(a) ** 2 * b),
    "swiglu": (SwiGLU(), lambda a, b: F.silu(a) * b),
    "situglu": (SiTUGLU(), situ),
    "clamped": (ClampedSwiGLU(), lambda a, b: clamped(a, b, 7.0, 1.702, 1.0)),
    "clamped_low": (
        ClampedSwiGLU(limit=0.75, alpha=1.0, glu_linear_offset=0.0),
        lambda a, b: clamped(a, b, 0.75, 1.0, 0.0),
    ),
}
OPS = [pytest.param(op, id=name) for name, (op, _) in CASES.items()]
INTERLEAVED = [
    pytest.param(cls(glu_interleave_size=1), id=f"{cls.__name__} in blocks")
    for cls in SWIGLU_FAMILY
]


@pytest.fixture
def nan_filled() -> Iterator[None]:
    """New memory holds NaN, so that an entry that nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", [(7, 10), (1, 2), (2, 3, 6)])
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(op: Any, shape: tuple[int, ...], device: torch.device) -> None:
    check_op(op, 2 * torch.randn(shape, device=device), dtypes=DTYPES, zero_rows=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [*OPS, *INTERLEAVED])
def test_half_precision_is_rounded_once(op: Any, dtype: torch.dtype) -> None:
    # The last is worked on in blocks of rows, the last of them smaller.
    for rows, cols in ((7, 10), (0, 6), (2 * BLOCK // 1006 + 1, 1006)):
        x = (2 * torch.randn(rows, cols + 3)).to(dtype)[:, :cols].requires_grad_()
        exact_x = x.detach().double().requires_grad_()
        y, exact_y = op(x), op.reference(exact_x)
        dy = torch.randn(cols // 2, rows).to(dtype).t()
        (dx,) = torch.autograd.grad(y, x, dy)
        (exact_dx,) = torch.autograd.grad(exact_y, exact_x, dy.double())
        assert_rounded_once(y.detach(), exact_y.detach(), f"y, {rows} rows")
        assert_rounded_once(dx, exact_dx, f"dx, {rows} rows")


@pytest.mark.parametrize(("op", "formula"), CASES.values(), ids=CASES)
def test_the_gate_is_the_first_half(op: Any, formula: Any, device: torch.device) -> None:
    x = (3 * torch.randn(9, 14, dtype=torch.float64, device=device)).requires_grad_()
    y, expected = op(x), formula(x[:, :7], x[:, 7:])
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy), rtol=1e-9, atol=1e-12
    )


def test_glu_swaps_the_halves_of_torch() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(GLU()(x), F.glu(x.roll(4, -1)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("nan_filled")
def test_every_entry_of_the_gradient_is_written(op: Any) -> None:
    x = torch.randn(33, 18, requires_grad=True)
    op(x).sum().backward()
    assert x.grad is not None
    assert not x.grad.isnan().any()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("cls", SWIGLU_FAMILY)
def test_interleaved_values_and_gradients(cls: Any, size: int, device: torch.device) -> None:
    op = cls(glu_interleave_size=size)
    check_op(op, torch.randn(5, 12, device=device), dtypes=DTYPES, zero_rows=True)
    check_op(op, torch.randn(2, 3, 12, device=device), zero_rows=True)


@pytest.mark.parametrize("cls", SWIGLU_FAMILY)
def test_interleaved_layout(cls: Any) -> None:
    a, b = torch.randn(5, 4), torch.randn(5, 4)
    halves = torch.cat((a, b), -1).requires_grad_()
    blocks = torch.cat((a[:, :2], b[:, :2], a[:, 2:], b[:, 2:]), -1).requires_grad_()
    y, y_blocks = cls()(halves), cls(glu_interleave_size=2)(blocks)
    torch.testing.assert_close(y_blocks, y)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, halves, dy)
    (dx_blocks,) = torch.autograd.grad(y_blocks, blocks, dy)
    torch.testing.assert_close(dx_blocks, dx[:, [0, 1, 4, 5, 2, 3, 6, 7]])


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [*((dtype, 7.0) for dtype in DTYPES), (torch.float32, 0.1), (torch.float64, 0.1)],
)
def test_clamping_passes_the_gradient_at_the_limits_only_up_to_them(
    dtype: torch.dtype, limit: float, device: torch.device
) -> None:
    at = torch.tensor(limit, dtype=dtype)
    inf = torch.tensor(torch.inf, dtype=dtype)
    beyond = at
    for _ in range(3):
        beyond = torch.nextafter(beyond, inf)
    edges = torch.stack((at, beyond, -at, -beyond)).to(device)
    one = torch.ones_like(edges)
    # Rows: gates at the edges, then linear units at the edges.
    x = torch.stack((torch.cat((edges, one / 16)), torch.cat((one / 16, edges)))).requires_grad_()
    (dx,) = torch.autograd.grad(ClampedSwiGLU(limit=limit)(x).sum(), x)
    assert dx[0, :4].ne(0).tolist() == [True, False, True, True]
    assert dx[1, 4:].ne(0).tolist() == [True, False, True, False]


@pytest.mark.parametrize("op", OPS)
def test_autocast(op: Any, device: torch.device) -> None:
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, torch.randn(6, 10, device=device))
        assert op(torch.randn(6, 10, device=device)).dtype == torch.bfloat16


@pytest.mark.parametrize("op", OPS)
def test_keeps_the_input_and_nothing_else(op: Any) -> None:
    x = torch.randn(5, 4, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        op(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("cls", SWIGLU_FAMILY)
def test_compiles_without_a_graph_break(cls: Any, size: int | None) -> None:
    torch.compiler.reset()
    model = Sequential(cls(glu_interleave_size=size))
    x = torch.randn(6, 8).t().contiguous().t().requires_grad_()
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, model(x))
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(model(x), x, dy))


@pytest.mark.parametrize("op", OPS)
def test_copies_compute_the_same(op: Any) -> None:
    x = torch.randn(5, 6)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        torch.testing.assert_close(twin(x), op(x), rtol=0, atol=0)


def test_arguments_are_readable() -> None:
    op = ClampedSwiGLU(limit=5.0, alpha=1.5, glu_linear_offset=0.5, glu_interleave_size=4)
    assert (op.limit, op.alpha, op.glu_linear_offset, op.glu_interleave_size) == (5, 1.5, 0.5, 4)
    assert (SiTUGLU().beta1, SiTUGLU().beta2) == (4, 25)
    assert SwiGLU().glu_interleave_size is None


@pytest.mark.parametrize("op", OPS)
def test_odd_last_dimension_is_refused(op: Any) -> None:
    text = rf"multiple of 2, .*\({type(op).__name__}\)\. Received: shape \(3, 5\)\. Give"
    with pytest.raises(InputError, match=text):
        op(torch.ones(3, 5))
    with pytest.raises(InputError, match=r"Received: shape \(\)"):
        op(torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("op", OPS)
def test_inputs_of_other_dtypes_are_refused(op: Any, dtype: torch.dtype) -> None:
    text = rf"fp32 or fp64 \({type(op).__name__}\)\. Received: a tensor of {dtype}\. Convert"
    with pytest.raises(InputError, match=text):
        op(torch.ones(3, 4).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "formula"), CASES.values(), ids=CASES)
def test_finite_at_infinity_where_the_formula_is(
    op: Any, formula: Any, dtype: torch.dtype, device: torch.device
) -> None:
    values = torch.tensor([-torch.inf, -1.0, 0.0, 1.0, torch.inf], dtype=dtype, device=device)
    x = torch.cartesian_prod(values, values).requires_grad_()
    y, want = op(x), formula(x[:, :1], x[:, 1:])
    dx, dwant = (torch.autograd.grad(z, x, torch.ones_like(z))[0] for z in (y, want))
    tolerance = 8 * torch.finfo(dtype).eps
    for got, expected in ((y, want), (dx, dwant)):
        finite = expected.isfinite()
        torch.testing.assert_close(
            got[finite], expected[finite], rtol=tolerance, atol=tolerance, check_stride=False
        )


@pytest.mark.parametrize("cls", SWIGLU_FAMILY)
def test_last_dimension_that_is_no_multiple_of_two_blocks_is_refused(cls: Any) -> None:
    with pytest.raises(InputError, match=rf"multiple of 6, .*\({cls.__name__}\).*\(3, 8\)"):
        cls(glu_interleave_size=3)(torch.ones(3, 8))


@pytest.mark.parametrize("cls", SWIGLU_FAMILY)
@pytest.mark.parametrize("size", [0, -2])
def test_interleave_size_must_be_positive(cls: Any, size: int) -> None:
    text = rf"glu_interleave_size must be positive or None\. Received: {size}"
    with pytest.raises(ArgumentError, match=text):
        cls(glu_interleave_size=size)


@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_caps_must_be_finite_and_positive(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=rf"{name} must be finite and positive.*{name}={value}"):
        SiTUGLU(**{name: value})


@pytest.mark.parametrize("limit", [0.0, -7.0, float("nan")])
def test_limit_must_be_positive(limit: float) -> None:
    with pytest.raises(ArgumentError, match=rf"limit must be positive\. Received: limit={limit}"):
        ClampedSwiGLU(limit=limit)


@pytest.mark.parametrize("cls", [GLU, GEGLU, QGEGLU, ReGLU, SReGLU, *SWIGLU_FAMILY])
def test_quantised_caching_is_not_supported(cls: Any) -> None:
    text = rf"no quantised compute \({cls.__name__}\)\. Received: cache_quantized_input=True"
    with pytest.raises(NotSupportedError, match=text):
        cls(cache_quantized_input=True)


def test_keywords_are_refused() -> None:
    with pytest.raises(OpKwargsError, match="alpha"):
        Sequential(SwiGLU())(torch.ones(2), op_kwargs={0: {"alpha": 2}})

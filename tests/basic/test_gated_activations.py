"""Products of gates and linear units, also times one factor per row."""

from __future__ import annotations

import copy
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
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
    SiTUGLU,
    SReGLU,
    SwiGLU,
)
from opfuser.errors import ArgumentError, InputError
from opfuser.op import BasicOperation
from opfuser.testing import check_op
from tests.basic.values import DTYPES, HALF, check_values, held_to, saved_by


def in_blocks(size: int, formula: Any) -> Any:
    """The formula for gates and linear units that alternate in blocks of columns."""

    def of_halves(x: Tensor) -> Tensor:
        result: Tensor = formula(x.unflatten(-1, (-1, 2, size)).transpose(-2, -3).flatten(-3))
        return result

    return of_halves


def product(gate: Any) -> Any:
    return lambda x: gate(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def situ(beta1: float = 4.0, beta2: float = 25.0) -> Any:
    def formula(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)

    return formula


def clamped(limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Any:
    def formula(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        return a * torch.sigmoid(alpha * a) * (b + offset)

    return formula


swiglu = product(F.silu)
LOW = {"limit": 0.75, "alpha": 1.0, "glu_linear_offset": 0.0}
GATED: dict[str, tuple[Any, Any]] = {
    "GLU": (GLU(), product(torch.sigmoid)),
    "GEGLU": (GEGLU(), product(lambda a: F.gelu(a, approximate="tanh"))),
    "QGEGLU": (QGEGLU(), product(lambda a: a * torch.sigmoid(1.702 * a))),
    "ReGLU": (ReGLU(), product(F.relu)),
    "SReGLU": (SReGLU(), product(lambda a: F.relu(a) ** 2)),
    "SwiGLU": (SwiGLU(), swiglu),
    "SwiGLU in blocks": (SwiGLU(glu_interleave_size=2), in_blocks(2, swiglu)),
    "SiTUGLU": (SiTUGLU(), situ()),
    "SiTUGLU in blocks": (
        SiTUGLU(beta1=2.0, beta2=9.0, glu_interleave_size=1),
        in_blocks(1, situ(2.0, 9.0)),
    ),
    "ClampedSwiGLU": (ClampedSwiGLU(), clamped()),
    "ClampedSwiGLU low": (ClampedSwiGLU(**LOW), clamped(0.75, 1.0, 0.0)),
    "ClampedSwiGLU in blocks": (
        ClampedSwiGLU(**LOW, glu_interleave_size=3),
        in_blocks(3, clamped(0.75, 1.0, 0.0)),
    ),
}
SCALED: dict[str, tuple[Any, Any]] = {
    "ScaledSwiGLU": (ScaledSwiGLU(), swiglu),
    "ScaledSwiGLU in blocks": (ScaledSwiGLU(2), in_blocks(2, swiglu)),
    "ScaledSiTUGLU": (ScaledSiTUGLU(beta1=2.0, beta2=9.0), situ(2.0, 9.0)),
    "ScaledSiTUGLU in blocks": (ScaledSiTUGLU(1), in_blocks(1, situ())),
    "ScaledClampedQGeGLU": (ScaledClampedQGeGLU(), clamped()),
    "ScaledClampedQGeGLU low": (ScaledClampedQGeGLU(**LOW), clamped(0.75, 1.0, 0.0)),
    "ScaledSReLU": (ScaledSReLU(), lambda x: F.relu(x) ** 2),
    "ScaledTanhSReLU": (
        ScaledTanhSReLU(tanh_clamp_scale=1.5),
        lambda x: (1.5 * torch.tanh(F.relu(x) / 1.5)) ** 2,
    ),
    "ScaledTanhSReLU high": (
        ScaledTanhSReLU(tanh_clamp_scale=40),
        lambda x: (40 * torch.tanh(F.relu(x) / 40)) ** 2,
    ),
}
CASES = {**GATED, **SCALED}
FAMILIES = {name.split()[0]: type(op) for name, (op, _) in CASES.items()}
GIVEN = {"ScaledTanhSReLU": {"tanh_clamp_scale": 1.5}}  # what constructors must be given
IN_BLOCKS = [SwiGLU, SiTUGLU, ClampedSwiGLU, ScaledSwiGLU, ScaledSiTUGLU, ScaledClampedQGeGLU]


def held(name: str) -> BasicOperation:
    op, formula = CASES[name]
    op = copy.deepcopy(op)
    if name in GATED:
        return held_to(op, lambda _, x: formula(x))
    return held_to(op, lambda _, x, scales: formula(x) * scales.unsqueeze(-1))


def inputs(op: Any, *shape: int) -> list[Tensor]:
    return [2 * torch.randn(shape), torch.randn(shape[:-1])][: 1 + op.num_extra_inputs]


@pytest.fixture
def nan_filled() -> Iterator[None]:
    """New memory holds NaN, so that an entry that nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("nan_filled")
def test_as_exact_as_torch(name: str, device: torch.device) -> None:
    op = held(name)
    check_values(op, *[t.to(device) for t in inputs(op, 2, 3, 12)])


def test_glu_swaps_the_halves_of_torch() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(GLU()(x), F.glu(x.roll(4, -1)))


@pytest.mark.parametrize("name", [name for name in GATED if "blocks" not in name])
def test_finite_at_infinity_where_the_formula_is(name: str, device: torch.device) -> None:
    op, formula = GATED[name]
    for dtype in DTYPES:
        values = torch.tensor([-torch.inf, -1.0, 0.0, 1.0, torch.inf], dtype=dtype, device=device)
        x = torch.cartesian_prod(values, values).requires_grad_()
        y, want = op(x), formula(x)
        dx, dwant = (torch.autograd.grad(z, x, torch.ones_like(z))[0] for z in (y, want))
        rounding = 8 * torch.finfo(dtype).eps
        for got, expected in ((y, want), (dx, dwant)):
            finite = expected.isfinite()
            torch.testing.assert_close(
                got[finite], expected[finite], rtol=rounding, atol=rounding, check_stride=False
            )


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, HALF[n % 2]) for n, name in enumerate(SCALED)], ids=str
)
def test_fp32_scales_are_cast_to_the_dtype_of_the_input(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    op = SCALED[name][0]
    x = torch.randn(5, 12, device=device).to(dtype).requires_grad_()
    scales = torch.rand(5, device=device).requires_grad_()
    y = op(x, scales)
    torch.testing.assert_close(y, op(x, scales.to(dtype)), rtol=0, atol=0)
    dx, dscales = torch.autograd.grad(y.float().sum(), (x, scales))
    assert (y.dtype, dx.dtype, dscales.dtype) == (dtype, dtype, torch.float32)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("Scaled")])
def test_asked_or_not_the_output_is_recomputed_and_the_same(name: str) -> None:
    x, scales = (t.requires_grad_() for t in inputs(ScaledSReLU(), 3, 8))
    for asked in (False, True):
        op = FAMILIES[name](**GIVEN.get(name, {}), activation_recompute_in_mlp=asked)
        assert op.activation_recompute_in_mlp is asked
        saved = saved_by(lambda op=op: op(x, scales))  # type: ignore[misc]
        assert [t.data_ptr() for t in saved] == [x.data_ptr(), scales.data_ptr()]
        check_op(op, x, scales)


@pytest.mark.parametrize("name", FAMILIES)
def test_inputs_of_other_shapes_are_refused(name: str) -> None:
    cls: Any = FAMILIES[name]
    shapes = [((), None)]
    if name not in ("ScaledSReLU", "ScaledTanhSReLU"):
        shapes.append(((3, 5), None))
    if cls in IN_BLOCKS:
        shapes.append(((3, 8), 3))
    for shape, size in shapes:
        op = cls(**({"glu_interleave_size": size} if size else GIVEN.get(name, {})))
        where = rf"multiple of {2 * (size or 1)}, .*\({name}\)\. Received: shape "
        with pytest.raises(InputError, match=rf"({where}|\({name}\)\. Received: (shape|input) \()"):
            op(*[torch.ones(s) for s in (shape, shape[:-1])][: 1 + op.num_extra_inputs])


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("Scaled")])
def test_scales_must_be_one_per_row(name: str) -> None:
    for shape in ((3,), (4, 2), (1, 4), ()):
        with pytest.raises(InputError, match=rf"without its last .*\({name}\).*input \(4, 6\)"):
            FAMILIES[name](**GIVEN.get(name, {}))(torch.ones(4, 6), torch.ones(shape))


@pytest.mark.parametrize("name", ["ScaledSwiGLU", "ScaledSReLU", "ScaledTanhSReLU"])
def test_scales_may_be_a_column(name: str, device: torch.device) -> None:
    x, scales = torch.randn(2, 3, 8, device=device), torch.randn(2, 3, 1, device=device)
    check_values(FAMILIES[name](**GIVEN.get(name, {})), x, scales)


def test_the_gradient_of_scales_has_their_dtype() -> None:
    """Those of a router are in fp32; rounding the gradient to bf16 would show in its weights."""
    x = torch.randn(5, 8).bfloat16()
    scales = torch.randn(5, requires_grad=True)
    FAMILIES["ScaledSwiGLU"]()(x, scales).float().square().sum().backward()
    assert scales.grad is not None
    assert not torch.equal(scales.grad, scales.grad.bfloat16().float())


def test_a_soft_cap_of_a_square() -> None:
    """Near 0 the square, far above it the square of the cap, and in between never beyond that."""
    op = ScaledTanhSReLU(tanh_clamp_scale=2.0)
    small = torch.tensor([[-torch.inf, -1.0, 0.0, 1e-3]], dtype=torch.float64)
    large = torch.tensor([[5.0, 50.0, 1e30, torch.inf]], requires_grad=True)
    one = torch.ones(1)
    torch.testing.assert_close(op(small, one), torch.relu(small).square(), rtol=1e-6, atol=0)
    y = op(large, one)
    torch.testing.assert_close(y[:, 1:], torch.full((1, 3), 4.0))
    assert (y <= 4).all()
    (dx,) = torch.autograd.grad(y, large, torch.full_like(y, torch.inf))
    assert dx[0, 0] == torch.inf


def test_no_cap_is_another_operation() -> None:
    """Which caps are refused: tests/basic/attributes.py."""
    with pytest.raises(ArgumentError, match=r"tanh_clamp_scale=0\. Use ScaledSReLU for no cap\."):
        ScaledTanhSReLU(tanh_clamp_scale=0)

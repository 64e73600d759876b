"""Every operation of te.ops inside a Sequential, against its formula in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import against, fill, rand

WIDTH = 12
Parameters = dict[str, Tensor]


class Case(NamedTuple):
    """How to make an operation, and its formula ``f(parameters, x, *extra inputs)``."""

    make: Callable[..., nn.Module]
    formula: Callable[..., Any]
    extras: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] | None = None


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda p, x: function(x)


def gated(function: Callable[..., Tensor], block: int = 0, **options: float) -> Any:
    """Of the two parts of the last dimension, which lie apart or in turn in blocks."""

    def formula(p: Parameters, x: Tensor) -> Tensor:
        if block:
            x = x.unflatten(-1, (-1, 2, block)).transpose(-2, -3).flatten(-3)
        return function(*x.chunk(2, -1), **options)

    return formula


def glu(gate: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: gate(a) * b


def situ(a: Tensor, b: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def clamped(
    a: Tensor, b: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0
) -> Tensor:
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + offset)


def per_row(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda p, x, s: formula(p, x) * s.unsqueeze(-1)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    dims = tuple(range(-w.dim(), 0))
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps) * w


def grouped(p: Parameters, x: Tensor, sizes: Tensor, *scales: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).split(sizes.tolist())
    factors = scales[0].split(sizes.tolist()) if scales else [r.new_ones(len(r)) for r in rows]
    out = [
        F.linear(r, p[f"weight{g}"]) + s[:, None] * p[f"bias{g}"]
        for g, (r, s) in enumerate(zip(rows, factors))
    ]
    return torch.cat(out).view(*x.shape[:-1], -1)


def layer_norm(shape: Any, one: int = 0, eps: float = 1e-5) -> Callable[..., Tensor]:
    return lambda p, x: F.layer_norm(x, shape, one + p["weight"], p["bias"], eps)


def rms(one: int = 0, eps: float = 1e-5) -> Callable[..., Tensor]:
    return lambda p, x: rms_norm(x, one + p["weight"], eps)


def linear(p: Parameters, x: Tensor) -> Tensor:
    return F.linear(x, p["weight"], p.get("bias"))


def same(p: Parameters, x: Tensor) -> Tensor:
    return x * 1


ROWS = (2, 3)
CENTRED: dict[str, Any] = {"eps": 0.1, "zero_centered_gamma": True}
LOW: dict[str, Any] = {"limit": 0.5, "alpha": 1.1, "glu_linear_offset": 0.3}
CASES: dict[str, Case] = {
    "Linear": Case(lambda **kw: of.Linear(WIDTH, 7, **kw), linear),
    "Linear, no bias": Case(lambda **kw: of.Linear(WIDTH, 7, bias=False, **kw), linear),
    "BasicLinear": Case(lambda **kw: of.BasicLinear(WIDTH, 7, **kw), linear),
    "Bias": Case(lambda **kw: of.Bias(WIDTH, **kw), lambda p, x: x + p["bias"]),
    "LayerNorm": Case(lambda **kw: of.LayerNorm(WIDTH, **kw), layer_norm((WIDTH,))),
    "LayerNorm, zero-centred": Case(
        lambda **kw: of.LayerNorm(WIDTH, **CENTRED, **kw), layer_norm((WIDTH,), 1, 0.1)
    ),
    "LayerNorm, two dimensions": Case(
        lambda **kw: of.LayerNorm([3, WIDTH], **kw), layer_norm((3, WIDTH))
    ),
    "RMSNorm": Case(lambda **kw: of.RMSNorm(WIDTH, **kw), rms()),
    "RMSNorm, zero-centred": Case(lambda **kw: of.RMSNorm(WIDTH, **CENTRED, **kw), rms(1, 0.1)),
    "RMSNorm, two dimensions": Case(lambda **kw: of.RMSNorm((3, WIDTH), **kw), rms()),
    "L2Normalization": Case(
        lambda **kw: of.L2Normalization(),
        unary(lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)),
    ),
    "GELU": Case(lambda **kw: of.GELU(), unary(gelu)),
    "QGELU": Case(lambda **kw: of.QGELU(), unary(qgelu)),
    "ReLU": Case(lambda **kw: of.ReLU(), unary(F.relu)),
    "SReLU": Case(lambda **kw: of.SReLU(), unary(srelu)),
    "SiLU": Case(lambda **kw: of.SiLU(), unary(F.silu)),
    "GLU": Case(lambda **kw: of.GLU(), gated(glu(torch.sigmoid))),
    "GEGLU": Case(lambda **kw: of.GEGLU(), gated(glu(gelu))),
    "QGEGLU": Case(lambda **kw: of.QGEGLU(), gated(glu(qgelu))),
    "ReGLU": Case(lambda **kw: of.ReGLU(), gated(glu(F.relu))),
    "SReGLU": Case(lambda **kw: of.SReGLU(), gated(glu(srelu))),
    "SwiGLU": Case(lambda **kw: of.SwiGLU(), gated(glu(F.silu))),
    "SwiGLU, interleaved": Case(
        lambda **kw: of.SwiGLU(glu_interleave_size=3), gated(glu(F.silu), 3)
    ),
    "SiTUGLU": Case(lambda **kw: of.SiTUGLU(), gated(situ)),
    "SiTUGLU, capped": Case(
        lambda **kw: of.SiTUGLU(beta1=0.5, beta2=0.7, glu_interleave_size=2),
        gated(situ, 2, beta1=0.5, beta2=0.7),
    ),
    "ClampedSwiGLU": Case(lambda **kw: of.ClampedSwiGLU(), gated(clamped)),
    "ClampedSwiGLU, clamped": Case(
        lambda **kw: of.ClampedSwiGLU(glu_interleave_size=1, **LOW),
        gated(clamped, 1, limit=0.5, alpha=1.1, offset=0.3),
    ),
    "ScaledSwiGLU": Case(
        lambda **kw: of.ScaledSwiGLU(2), per_row(gated(glu(F.silu), 2)), (ROWS,)
    ),
    "ScaledSiTUGLU": Case(
        lambda **kw: of.ScaledSiTUGLU(beta1=0.5), per_row(gated(situ, beta1=0.5)), (ROWS,)
    ),
    "ScaledClampedQGeGLU": Case(
        lambda **kw: of.ScaledClampedQGeGLU(limit=0.5), per_row(gated(clamped, limit=0.5)), (ROWS,)
    ),
    "ScaledSReLU": Case(lambda **kw: of.ScaledSReLU(), per_row(unary(srelu)), (ROWS,)),
    "GroupedLinear": Case(
        lambda **kw: of.GroupedLinear(3, WIDTH, 7, **kw), grouped, sizes=(2, 0, 4)
    ),
    "GroupedLinear, scaled bias": Case(
        lambda **kw: of.GroupedLinear(2, WIDTH, 7, scale_bias=True, **kw), grouped, ((6,),), (5, 1)
    ),
    "AddExtraInput": Case(
        lambda **kw: of.AddExtraInput(), lambda p, x, h: x + h, ((*ROWS, WIDTH),)
    ),
    "MakeExtraOutput": Case(lambda **kw: of.MakeExtraOutput(), lambda p, x: (x * 1, x * 1)),
    "ConstantScale": Case(lambda **kw: of.ConstantScale(-0.3), lambda p, x: -0.3 * x),
    "Dropout, off": Case(lambda **kw: of.Dropout(0.0), same),
    "Dropout, evaluating": Case(lambda **kw: of.Dropout(0.7).eval(), same),
    "Identity": Case(lambda **kw: of.Identity(), same),
    "Reshape": Case(lambda **kw: of.Reshape((-1, 4)), lambda p, x: x.reshape(-1, 4)),
    "Quantize": Case(lambda **kw: of.Quantize(), same),
    "AllReduce": Case(lambda **kw: of.AllReduce(), same),
    "AllGather": Case(lambda **kw: of.AllGather(), same),
    "ReduceScatter": Case(lambda **kw: of.ReduceScatter(), same),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operation(name: str) -> None:
    case = CASES[name]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        op = fill(case.make(dtype=dtype, device="cpu"))
        x = rand(*ROWS, WIDTH, dtype=dtype, grad=True)
        extras = [rand(*shape, dtype=dtype, grad=True) for shape in case.extras]
        if case.sizes is not None:
            extras.insert(0, torch.tensor(case.sizes))
        model = of.Sequential(of.Sequential(of.Identity(), op), of.ConstantScale(1.0))
        ys = against(model, case.formula, x, *extras, parameters=op.named_parameters())
        assert all(y.dtype == dtype for y in ys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_in_training(dtype: torch.dtype) -> None:
    """The mask is read off the output: the entries kept, and their gradients, are scaled alike."""
    p = 0.25
    x = rand(40, 50).abs().add(0.5).to(dtype).requires_grad_()
    dy = rand(40, 50).abs().add(0.5).to(dtype)
    y = of.Sequential(of.Identity(), of.Dropout(p))(x)
    y.backward(dy)
    kept = y != 0
    assert 0.7 < kept.double().mean().item() < 0.8
    floor = 2 * torch.finfo(dtype).eps
    for got, full in ((y, x), (x.grad, dy)):
        want = torch.where(kept, full.detach().double() / (1 - p), 0.0)
        torch.testing.assert_close(got.detach().double(), want, rtol=floor, atol=0)

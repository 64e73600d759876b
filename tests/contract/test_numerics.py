"""Every public operation inside a Sequential: forward and all gradients, against plain torch.

The reference is the formula in float64; the error may be twice that of the same formula in plain
torch in the dtype under test, plus a floor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import fill, rand

WIDTH = 12
DTYPES = [torch.float32, torch.bfloat16]

Parameters = dict[str, Tensor]


class Case(NamedTuple):
    """How to make an operation, and its formula ``f(x, parameters, *extra inputs)``."""

    make: Callable[[dict[str, Any]], nn.Module]
    formula: Callable[..., Any]
    extras: Callable[[tuple[int, ...]], list[tuple[int, ...]]] = lambda rows: []
    integers: tuple[int, ...] | None = None


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gated(gate: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def formula(x: Tensor, p: Parameters) -> Tensor:
        a, b = x.chunk(2, -1)
        return gate(a) * b

    return formula


def situ(x: Tensor, beta1: float, beta2: float) -> Tensor:
    a, b = x.chunk(2, -1)
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def clamped(x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    a, b = x.chunk(2, -1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + offset)


def deinterleave(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, 2, size)).transpose(-2, -3).flatten(-3)


def unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, p: function(x)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    dims = tuple(range(-w.dim(), 0))
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps) * w


def grouped(x: Tensor, p: Parameters, sizes: Tensor, *scales: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).split(sizes.tolist())
    out = [F.linear(r, p[f"weight{g}"]) for g, r in enumerate(rows)]
    per_row = scales[0].split(sizes.tolist()) if scales else [torch.ones(len(r)) for r in rows]
    if "bias0" in p:
        out = [
            y + s[:, None].to(y.dtype) * p[f"bias{g}"] for g, (y, s) in enumerate(zip(out, per_row))
        ]
    return torch.cat(out).view(*x.shape[:-1], -1)


def per_row(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, p, s: formula(x, p) * s.unsqueeze(-1)


CASES: dict[str, Case] = {
    "Linear": Case(
        lambda kw: of.Linear(WIDTH, 7, **kw), lambda x, p: F.linear(x, p["weight"], p["bias"])
    ),
    "Linear, no bias": Case(
        lambda kw: of.Linear(WIDTH, 7, bias=False, **kw), lambda x, p: F.linear(x, p["weight"])
    ),
    "BasicLinear": Case(
        lambda kw: of.BasicLinear(WIDTH, 7, **kw), lambda x, p: F.linear(x, p["weight"])
    ),
    "Bias": Case(lambda kw: of.Bias(WIDTH, **kw), lambda x, p: x + p["bias"]),
    "LayerNorm": Case(
        lambda kw: of.LayerNorm(WIDTH, **kw),
        lambda x, p: F.layer_norm(x, (WIDTH,), p["weight"], p["bias"], 1e-5),
    ),
    "LayerNorm, zero-centred": Case(
        lambda kw: of.LayerNorm(WIDTH, eps=0.1, zero_centered_gamma=True, **kw),
        lambda x, p: F.layer_norm(x, (WIDTH,), 1 + p["weight"], p["bias"], 0.1),
    ),
    "RMSNorm": Case(lambda kw: of.RMSNorm(WIDTH, **kw), lambda x, p: rms_norm(x, p["weight"])),
    "RMSNorm, zero-centred": Case(
        lambda kw: of.RMSNorm(WIDTH, eps=0.1, zero_centered_gamma=True, **kw),
        lambda x, p: rms_norm(x, 1 + p["weight"], 0.1),
    ),
    "RMSNorm, two dimensions": Case(
        lambda kw: of.RMSNorm((3, WIDTH), **kw), lambda x, p: rms_norm(x, p["weight"])
    ),
    "LayerNorm, two dimensions": Case(
        lambda kw: of.LayerNorm([3, WIDTH], **kw),
        lambda x, p: F.layer_norm(x, (3, WIDTH), p["weight"], p["bias"], 1e-5),
    ),
    "L2Normalization": Case(
        lambda kw: of.L2Normalization(),
        lambda x, p: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
    ),
    "GELU": Case(lambda kw: of.GELU(), unary(gelu)),
    "QGELU": Case(lambda kw: of.QGELU(), unary(qgelu)),
    "ReLU": Case(lambda kw: of.ReLU(), unary(F.relu)),
    "SReLU": Case(lambda kw: of.SReLU(), unary(srelu)),
    "SiLU": Case(lambda kw: of.SiLU(), unary(F.silu)),
    "GLU": Case(lambda kw: of.GLU(), gated(torch.sigmoid)),
    "GEGLU": Case(lambda kw: of.GEGLU(), gated(gelu)),
    "QGEGLU": Case(lambda kw: of.QGEGLU(), gated(qgelu)),
    "ReGLU": Case(lambda kw: of.ReGLU(), gated(F.relu)),
    "SReGLU": Case(lambda kw: of.SReGLU(), gated(srelu)),
    "SwiGLU": Case(lambda kw: of.SwiGLU(), gated(F.silu)),
    "SwiGLU, interleaved": Case(
        lambda kw: of.SwiGLU(glu_interleave_size=3),
        lambda x, p: gated(F.silu)(deinterleave(x, 3), p),
    ),
    "SiTUGLU": Case(lambda kw: of.SiTUGLU(), lambda x, p: situ(x, 4.0, 25.0)),
    "SiTUGLU, capped": Case(
        lambda kw: of.SiTUGLU(beta1=0.5, beta2=0.7, glu_interleave_size=2),
        lambda x, p: situ(deinterleave(x, 2), 0.5, 0.7),
    ),
    "ClampedSwiGLU": Case(lambda kw: of.ClampedSwiGLU(), lambda x, p: clamped(x, 7.0, 1.702, 1.0)),
    "ClampedSwiGLU, clamped": Case(
        lambda kw: of.ClampedSwiGLU(
            limit=0.5, alpha=1.1, glu_linear_offset=0.3, glu_interleave_size=1
        ),
        lambda x, p: clamped(deinterleave(x, 1), 0.5, 1.1, 0.3),
    ),
    "ScaledSwiGLU": Case(
        lambda kw: of.ScaledSwiGLU(2),
        per_row(lambda x, p: gated(F.silu)(deinterleave(x, 2), p)),
        lambda rows: [rows],
    ),
    "ScaledSiTUGLU": Case(
        lambda kw: of.ScaledSiTUGLU(beta1=0.5),
        per_row(lambda x, p: situ(x, 0.5, 25.0)),
        lambda rows: [rows],
    ),
    "ScaledClampedQGeGLU": Case(
        lambda kw: of.ScaledClampedQGeGLU(limit=0.5),
        per_row(lambda x, p: clamped(x, 0.5, 1.702, 1.0)),
        lambda rows: [rows],
    ),
    "ScaledSReLU": Case(lambda kw: of.ScaledSReLU(), per_row(unary(srelu)), lambda rows: [rows]),
    "GroupedLinear": Case(
        lambda kw: of.GroupedLinear(3, WIDTH, 7, **kw), grouped, integers=(2, 0, 4)
    ),
    "GroupedLinear, scaled bias": Case(
        lambda kw: of.GroupedLinear(2, WIDTH, 7, scale_bias=True, **kw),
        grouped,
        lambda rows: [(6,)],
        integers=(5, 1),
    ),
    "AddExtraInput": Case(
        lambda kw: of.AddExtraInput(), lambda x, p, h: x + h, lambda rows: [(*rows, WIDTH)]
    ),
    "MakeExtraOutput": Case(lambda kw: of.MakeExtraOutput(), lambda x, p: (x * 1, x * 1)),
    "ConstantScale": Case(lambda kw: of.ConstantScale(-0.3), lambda x, p: -0.3 * x),
    "Dropout, off": Case(lambda kw: of.Dropout(0.0), lambda x, p: x * 1),
    "Dropout, evaluating": Case(lambda kw: of.Dropout(0.7).eval(), lambda x, p: x * 1),
    "Identity": Case(lambda kw: of.Identity(), lambda x, p: x * 1),
    "Reshape": Case(lambda kw: of.Reshape((-1, 4)), lambda x, p: x.reshape(-1, 4)),
    "Quantize": Case(lambda kw: of.Quantize(), lambda x, p: x * 1),
    "AllReduce": Case(lambda kw: of.AllReduce(), lambda x, p: x * 1),
    "AllGather": Case(lambda kw: of.AllGather(), lambda x, p: x * 1),
    "ReduceScatter": Case(lambda kw: of.ReduceScatter(), lambda x, p: x * 1),
}


def evaluate(
    run: Callable[..., Any], x: Tensor, p: Parameters, extras: list[Tensor], dys: list[Tensor]
) -> dict[str, Tensor]:
    """Outputs and gradients of the formula, by plain autograd."""
    leaves = {"x": x, **p, **{f"extra {n}": e for n, e in enumerate(extras)}}
    leaves = {k: t for k, t in leaves.items() if t.is_floating_point()}
    out = run(x, p, *extras)
    outs = list(out) if isinstance(out, tuple) else [out]
    grads = torch.autograd.grad(outs, list(leaves.values()), dys, allow_unused=True)
    found = {f"y{n}": y.detach() for n, y in enumerate(outs)}
    found |= {f"gradient of {name}": g for name, g in zip(leaves, grads)}
    return found


def copies(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        k: t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t
        for k, t in tensors.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operation(name: str, dtype: torch.dtype) -> None:
    case, rows = CASES[name], (2, 3)
    op = fill(case.make({"dtype": dtype, "device": "cpu"}))
    x = rand(*rows, WIDTH, dtype=dtype, grad=True)
    floats = [rand(*shape, dtype=dtype, grad=True) for shape in case.extras(rows)]
    extras = [*([torch.tensor(case.integers)] if case.integers else []), *floats]
    neighbours = op if name == "MakeExtraOutput" else of.Sequential(of.Identity(), op)
    model = of.Sequential(neighbours, of.ConstantScale(1.0))
    out = model(x, *extras)
    outs = list(out) if isinstance(out, tuple) else [out]
    for y in outs:
        assert y.dtype == dtype
    dys = [rand(*y.shape, dtype=dtype) for y in outs]
    torch.autograd.backward(outs, dys)
    got = {f"y{n}": y.detach() for n, y in enumerate(outs)}
    got |= {f"gradient of {k}": p.grad for k, p in op.named_parameters()}
    got["gradient of x"] = x.grad
    got |= {f"gradient of extra {n}": e.grad for n, e in enumerate(extras) if e.requires_grad}

    inputs = {"x": x, **dict(op.named_parameters())}
    inputs |= {f"extra {n}": e for n, e in enumerate(extras)}

    def plain(as_dtype: torch.dtype) -> dict[str, Tensor]:
        t = copies(inputs, as_dtype)
        names = [k for k in t if k.startswith("extra")]
        p = {k: v for k, v in t.items() if k != "x" and k not in names}
        return evaluate(
            case.formula, t["x"], p, [t[k] for k in names], [dy.to(as_dtype) for dy in dys]
        )

    exact, same = plain(torch.float64), plain(dtype)
    assert got.keys() == exact.keys()
    for key, want in exact.items():
        assert got[key] is not None, key
        assert got[key].shape == want.shape, key
        error = (got[key].double() - want).abs().max().item()
        allowed = 2 * (same[key].double() - want).abs().max().item()
        floor = torch.finfo(dtype).eps * max(1.0, want.abs().max().item())
        assert error <= allowed + floor, key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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

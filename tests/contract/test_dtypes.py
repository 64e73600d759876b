"""Dtypes of outputs and gradients, without and with autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import close, fill, leaf, rand

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOLERANCE = {BF16: 5e-2, FP16: 6e-3, FP32: 1e-4, FP64: 1e-4}


def block(dtype: torch.dtype) -> of.Sequential:
    kw = {"dtype": dtype, "device": "cpu"}
    return fill(
        of.Sequential(
            of.RMSNorm(8, **kw), of.Linear(8, 16, **kw), of.SwiGLU(), of.AddExtraInput(),
            of.LayerNorm(8, **kw), of.Linear(8, 5, **kw), of.GELU(),
        )
    )  # fmt: skip


def reference(model: of.Sequential, x: Tensor, extra: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    p = {name: leaf(value) for name, value in model.named_parameters()}
    normed = F.rms_norm(x, (8,), p["0.weight"], 1e-5)
    a, b = F.linear(normed, p["1.weight"], p["1.bias"]).chunk(2, -1)
    y = F.layer_norm(F.silu(a) * b + extra, (8,), p["4.weight"], p["4.bias"], 1e-5)
    return F.gelu(F.linear(y, p["5.weight"], p["5.bias"]), approximate="tanh"), p


def check(model: of.Sequential, x: Tensor, h: Tensor, y: Tensor, tolerance: float) -> None:
    """Gradients have the dtypes of what they belong to, and the right values."""
    dy = rand(*y.shape).to(y.dtype)
    y.backward(dy)
    x64, h64 = leaf(x), leaf(h)
    want, p64 = reference(model, x64, h64)
    want.backward(dy.double())
    owners = [(x, x64), (h, h64), *((p, p64[name]) for name, p in model.named_parameters())]
    for t, _ in owners:
        assert t.grad is not None
        assert t.grad.dtype == t.dtype
    for got, expected in [(y, want), *((t.grad, t64.grad) for t, t64 in owners)]:
        scale = max(1.0, expected.abs().max().item())
        close(got.double() / scale, expected / scale, tolerance)


@pytest.mark.parametrize(
    ("inputs", "params"),
    [
        (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP32, BF16), (FP64, FP16), (FP32, FP64),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_have_the_dtype_of_what_they_belong_to(
    inputs: torch.dtype, params: torch.dtype
) -> None:
    model = block(params)
    x, h = rand(3, 8, dtype=inputs, grad=True), rand(3, 8, dtype=params, grad=True)
    y = model(x, h)
    assert y.dtype == params, "linear operations decide: they compute in their weight's dtype"
    check(model, x, h, y, max(TOLERANCE[inputs], TOLERANCE[params]))


@pytest.mark.parametrize(
    ("inputs", "params", "autocast"),
    [(FP32, FP32, BF16), (BF16, FP32, FP16), (BF16, BF16, FP16), (FP32, BF16, BF16)],
    ids=str,
)
def test_autocast(inputs: torch.dtype, params: torch.dtype, autocast: torch.dtype) -> None:
    model = block(params)
    x, h = rand(3, 8, dtype=inputs, grad=True), rand(3, 8, dtype=autocast, grad=True)
    with torch.autocast("cpu", autocast):
        y = model(x, h)
    assert y.dtype == autocast
    # As usual, backward runs outside of the region.
    check(model, x, h, y, 2 * TOLERANCE[BF16])


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """The state that a CUDA autocast region sets, on a machine with or without CUDA."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", FP16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("where", ["switched off inside", "another device"])
def test_autocast_that_does_not_hold(where: str) -> None:
    model = block(FP32)
    x, h = rand(3, 8, dtype=FP32, grad=True), rand(3, 8, dtype=FP32, grad=True)
    if where == "another device":
        with cuda_autocast():
            y = model(x, h)
    else:
        with torch.autocast("cpu", BF16):
            assert model(x, h).dtype == BF16
            with torch.autocast("cpu", enabled=False):
                y = model(x, h)
    assert y.dtype == FP32
    check(model, x, h, y, TOLERANCE[FP32])


@pytest.mark.parametrize("split", [False, True])
def test_extra_gradient_in_another_dtype_than_the_output(split: bool) -> None:
    """A tap before a linear in another dtype: both gradients meet in the dtype of the input."""
    linear = fill(of.Linear(8, 8, dtype=BF16, device="cpu"))
    plain: list[nn.Module] = [nn.Identity()] if split else []
    model = of.Sequential(of.MakeExtraOutput(), *plain, linear)
    x = rand(3, 8, dtype=FP32, grad=True)
    y, extra = model(x)
    assert (y.dtype, extra.dtype) == (BF16, FP32)
    dy, dextra = rand(3, 8, dtype=BF16), rand(3, 8, dtype=FP32)
    torch.autograd.backward([y, extra], [dy, dextra])
    assert x.grad is not None
    assert x.grad.dtype == FP32
    close(x.grad, dy.double() @ linear.weight.double() + dextra.double(), 0.1)

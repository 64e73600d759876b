"""Recorded passes as they run on a GPU: launches that are given addresses, and products of codes.

The interpreter takes the place of Triton's launcher, and a product of the values that of cuBLASLt.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import opfuser
from opfuser import torch_internals
from opfuser.engine.recorded.recordable import unrecorded
from opfuser.kernels.launch import INTERPRETED, Launch
from opfuser.quantization import products
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    MXFP8BlockScaling,
    Recipe,
)
from tests.kernels.bounds import live_tensors

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs kernels that run on a CPU")

RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "saved": Float8PredictedScaling(save_activations="fp8"),
}


def extent(t: Tensor) -> int:
    """Bytes from the first element to the last one."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return (last + 1) * t.itemsize if t.numel() else 0


def memory_of(t: Tensor, dtype: torch.dtype) -> Tensor:
    """All of it, without its shape."""
    place = t.storage_offset() * t.itemsize // dtype.itemsize, (extent(t) // dtype.itemsize,)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return torch.empty(0, dtype=dtype).set_(t.untyped_storage(), *place)


def prepared(launch: Launch, tensors: tuple[Tensor | None, ...], ints: tuple[int, ...]) -> Any:
    """As a binary is launched: dtypes are those of the call that was recorded."""
    dtypes = [None if t is None else t.dtype for t in tensors]

    def run(x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        at = {t.data_ptr(): t for t in sorted(live_tensors(), key=extent)}  # the largest one
        pairs = zip(args, dtypes)
        given = [p if d is None else memory_of(at[p], d) for p, d in pairs]
        rest = args[len(dtypes) : len(args) - len(launch.values)]
        launch.function[x, y, z](*given, *rest, *launch.values, **launch.options)

    return run, launch.name, (), False, launch.values


def product(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """As ``torch._scaled_mm_v2``, but with one factor in place of all scales of blocks."""
    if has_torch_function((a, b)):
        return handle_torch_function(product, (a, b), a, b, *rest)
    assert a.stride(1) == b.stride(0) == 1
    factors = [s if s.numel() == 1 else 2.0 ** -(8 + len(s.shape)) for (s,) in (rest[0], rest[3])]
    y = a.float() @ b.float() * factors[0] * factors[1]
    return y.to(rest[7])


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "prepared", prepared)
    monkeypatch.setattr(torch, "_scaled_mm_v2", product)
    monkeypatch.setattr(products, "has_hardware", lambda device, recipe: True)
    monkeypatch.setattr(torch_internals, "cuda_stream", lambda device: 0)


def swiglu() -> opfuser.Sequential:
    torch.manual_seed(0)
    return opfuser.Sequential(
        opfuser.RMSNorm(128),
        opfuser.Linear(128, 256, bias=False),
        opfuser.SwiGLU(),
        opfuser.Linear(128, 128, bias=False),
    ).to(torch.bfloat16)


def step(model: nn.Module, recipe: Recipe | None, n: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(n)
    x = (torch.randn(16, 128, generator=generator) * 3.0 ** (n % 3)).bfloat16().requires_grad_()
    model.zero_grad()
    with opfuser.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.square().sum().backward()
    kept = [t.clone() for t in model.state_dict().values()]
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()], *kept]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_steps_are_those_of_the_program(recipe: Recipe | None) -> None:
    model = swiglu()
    other = copy.deepcopy(model)
    for n in range(4):
        ours = step(model, recipe, n)
        with unrecorded():
            theirs = step(other, recipe, n)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert "stream" in model.last_plan.recorded
    assert "stream" not in other.last_plan.recorded


def test_experts_are_chosen_and_checked_at_every_call() -> None:
    router = opfuser.Sequential(opfuser.TopKRouter(8, 2, norm_topk_prob=True, aux_loss=True))
    permute = opfuser.Sequential(opfuser.Permute(8))

    def once() -> list[Tensor]:
        logits, x = torch.randn(20, 8, requires_grad=True), torch.randn(20, 16, requires_grad=True)
        weights, indices, _, aux = router(logits)
        rows, _, _, row_weights = permute(x, indices, weights)
        total = (rows * row_weights.unsqueeze(-1)).square().sum() + aux
        return [rows, row_weights, *torch.autograd.grad(total, (logits, x))]

    for n in range(4):
        torch.manual_seed(n)
        ours = once()
        torch.manual_seed(n)
        with unrecorded():
            theirs = once()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert all("launch" in str(seq.last_plan.recorded) for seq in (router, permute))
    x, weights = torch.randn(20, 16, requires_grad=True), torch.rand(20, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^The experts' indices must be from 0 to 7"):
        permute(x, torch.full((20, 2), 8), weights)

"""What is told of quantized tensors, against counts from the definition in float64."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import QuantizationRecord
from opfuser.quantization import quantizers
from opfuser.quantization.operation_state import state_of
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    Format,
    Recipe,
)
from tests.kernels.codes import E4M3, E5M2, TOP, expected

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

# The largest value that is rounded to the largest one of the format: half a step above it.
LAST = {E4M3: 464.0, E5M2: 61440.0}
DELAYED = DelayedScaling()
ROLES = ["input", "weight", "grad_output"]


def linear(features: int = 128) -> Any:
    return opfuser.Sequential(opfuser.BasicLinear(features, features))


def watched(seq: Any, x: Tensor, dy: Tensor, recipe: Recipe = DELAYED) -> list[QuantizationRecord]:
    """One of each role."""
    with opfuser.watch_quantization(seq) as tensors:
        with opfuser.autocast(recipe=recipe):
            y = seq(x.clone().requires_grad_())
        y.backward(dy)
    by_role: dict[str, QuantizationRecord] = {}
    for told in tensors:
        assert told.operation == "0"
        first = by_role.setdefault(told.role, told)
        assert recipe.float8_block_scaling() or told == first
    assert list(by_role) == ROLES
    return list(by_role.values())


def wide(rows: int, cols: int = 128) -> Tensor:
    """Values of all sizes, and zeros of both signs."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-25, 12, (rows, cols)).float())
    x[::3, ::5] = 0.0
    x[1, 1] = -0.0
    return x


def scaled_by_one(seq: opfuser.Sequential, recipe: Recipe) -> opfuser.Sequential:
    """Its first call, with the recipe, takes no scales from its values."""
    state_of(seq[0], recipe, None).known = [True] * 3
    return seq


def check(told: QuantizationRecord, x: Tensor, scale: float) -> None:
    assert told.scale == pytest.approx(scale, rel=1e-6)
    top = TOP[told.dtype]
    assert told.limit == pytest.approx(top / scale, rel=1e-6)
    product = x.double().abs() * scale
    assert told.saturated == (product > LAST[told.dtype]).sum()
    zero = (expected(x, scale, told.dtype) & 0x7F) == 0
    assert told.underflowed == (zero & (x != 0)).sum()
    assert (told.amax, told.elements) == (x.abs().max().item(), x.numel())


@pytest.mark.parametrize("format_", [Format.HYBRID, Format.E4M3], ids=str)
def test_one_scale(format_: Format, device: torch.device) -> None:
    seq, dy = linear().to(device), wide(7).to(device)
    seq[0].weight.data = wide(128).to(device)
    x = wide(7).to(device)
    recipe = DelayedScaling(fp8_format=format_)
    scaled_by_one(seq, recipe)
    tensors = watched(seq, x, dy, recipe)
    assert [told.dtype for told in tensors] == [E4M3, E4M3, format_.backward]
    own = [t.detach().cpu() for t in (x, seq[0].weight, dy)]
    for told, t in zip(tensors, own):
        check(told, t, 1.0)
        assert told.underflowed > 0
        assert told.saturated > 0 or told.dtype == E5M2
    scales = []
    for n, told in enumerate(watched(seq, x * 3, dy * 3, recipe)):
        t = own[n] if told.role == "weight" else 3 * own[n]
        scales.append(seq[0].quantization.scale[n].item())
        check(told, t, scales[-1])
    assert 1.0 not in scales


def test_what_rounds_to_the_limit_is_not_saturated() -> None:
    x = torch.tensor([[448.0, 463.9, 464.0, -464.0, 464.1, -1e30, math.inf, 0.0] * 16])
    (first, *_) = watched(scaled_by_one(linear(), DelayedScaling()), x, torch.ones(1, 128))
    assert first.saturated == 3 * 16
    assert first.amax == math.inf
    x[0, 3] = math.nan
    (first, *_) = watched(scaled_by_one(linear(), DelayedScaling()), x, torch.ones(1, 128))
    assert math.isnan(first.amax)
    assert first.saturated == 3 * 16


@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), Float8PredictedScaling()], ids=lambda r: type(r).__name__
)
def test_scales_of_the_tensor_itself_saturate_nothing(recipe: Recipe) -> None:
    x, dy = wide(130), wide(130)
    for told, t in zip(watched(linear(), x, dy, recipe)[::2], (x, dy)):
        check(told, t, TOP[told.dtype] / t.abs().max().item())
        assert told.saturated == 0


def test_blocks() -> None:
    x, dy = wide(130, 256), torch.ones(130, 256)
    seq = linear(256)
    tensors = watched(seq, x, dy, Float8BlockScaling())
    zeros = 0
    for row in x.unflatten(1, (2, 128)).flatten(0, 1):
        exponent = math.floor(math.log2(448 / row.abs().max().item()))
        zeros += int((((expected(row, 2.0**exponent, E4M3) & 0x7F) == 0) & (row != 0)).sum())
    assert 0 < zeros == tensors[0].underflowed
    assert tensors[2].underflowed == 0
    for told in tensors:
        assert (told.scale, told.limit, told.saturated) == (None, None, 0)
    assert "scales of blocks" in str(tensors[0])


@pytest.mark.parametrize(
    "recipe",
    [DELAYED, Float8CurrentScaling(), Float8BlockScaling()],
    ids=lambda r: type(r).__name__,
)
def test_rows_of_groups_are_told_without_padding(recipe: Recipe) -> None:
    op = opfuser.GroupedLinear(3, 128, 256, bias=False)
    x, dy = wide(9), wide(9, 256)
    seq: Any = opfuser.Sequential(op)
    with opfuser.watch_quantization(seq) as tensors:
        with opfuser.autocast(recipe=recipe):
            y = seq(x.requires_grad_(), torch.tensor([4, 0, 5]))
        y.backward(dy)
    sizes = {"input": x.numel(), "weight": op.weight0.numel(), "grad_output": dy.numel()}
    assert [t.elements for t in tensors] == [sizes[t.role] for t in tensors]
    # Weights again in backward.
    assert [t.role for t in tensors] == ["input", *["weight"] * 3, "grad_output", *["weight"] * 3]
    # Zeros of padding underflow no more than those of the tensor.
    (whole,) = watched(linear(), x.detach(), wide(9), recipe)[:1]
    assert tensors[0][1:] == whole[1:]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            opfuser.Sequential(opfuser.Linear(32, 32), opfuser.GELU()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_names_and_callbacks() -> None:
    model, told = Model(), []
    x = torch.randn(3, 32)
    with (
        opfuser.watch_quantization(model, told.append) as none,
        opfuser.watch_quantization() as all_,
    ):
        with opfuser.autocast(recipe=DelayedScaling()):
            y = model(x)
        y.sum().backward()
    assert none == []
    assert sorted({t.operation for t in told}) == ["layers.0.0", "layers.1.0"]
    assert {t.operation for t in all_} == {"BasicLinear(in_features=32, out_features=32)"}
    assert [t[1:] for t in told] == [t[1:] for t in all_]
    assert str(told[0]).startswith("layers.0.0 input (float8_e4m3fn): amax")
    with opfuser.autocast(recipe=DelayedScaling()):
        model(x)
    assert len(told) == len(all_)

    def stop(_: QuantizationRecord) -> None:
        raise RuntimeError("far enough")

    with (
        opfuser.watch_quantization(callback=stop),
        opfuser.autocast(recipe=DelayedScaling()),
        pytest.raises(RuntimeError, match="far enough"),
    ):
        model(x)


def test_nothing_is_counted_unless_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seq, x, dy = linear(), torch.randn(3, 128), torch.randn(3, 128)

    def gradients() -> list[Tensor]:
        with opfuser.autocast(recipe=Float8CurrentScaling()):
            y = seq(x)
        return [y.detach(), *torch.autograd.grad(y, seq.parameters(), dy)]

    with opfuser.watch_quantization():
        told = gradients()
    monkeypatch.setattr(quantizers, "tell", None)
    for a, b in zip(told, gradients()):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    "recipe",
    [DELAYED, Float8BlockScaling(), Float8CurrentScaling()],
    ids=lambda r: type(r).__name__,
)
def test_what_fused_operations_hand_on_is_told_too(recipe: Recipe) -> None:
    """Then as a tensor, whose codes are those of its dtype's values."""
    seq = opfuser.Sequential(
        opfuser.RMSNorm(128),
        opfuser.Linear(128, 512, bias=False),
        opfuser.SwiGLU(),
        opfuser.Linear(256, 128, bias=False),
    )
    x = torch.randn(9, 128)

    def gradients(middle: Any) -> list[Tensor]:
        own = x.clone().requires_grad_()
        with opfuser.autocast(recipe=recipe):
            y = seq(own)
        with middle:
            y.backward(torch.ones(9, 128))
        grads = [y.detach(), own.grad, *(p.grad for p in seq.parameters())]
        seq.zero_grad()
        return grads

    gradients(contextlib.nullcontext())
    plain = gradients(contextlib.nullcontext())
    assert seq.last_plan.edges
    with opfuser.watch_quantization(seq) as told:
        watched_ = gradients(contextlib.nullcontext())
    assert {(t.operation, t.role) for t in told} == {(n, role) for n in "13" for role in ROLES}
    late: list[opfuser.QuantizationRecord] = []  # of backward alone
    backward = gradients(opfuser.watch_quantization(seq, late.append))
    assert {(t.operation, t.role) for t in late} >= {("1", "grad_output"), ("3", "grad_output")}
    for a, b, c in zip(plain, watched_, backward):
        for other in (b, c):
            torch.testing.assert_close(other, a, rtol=0.05, atol=0.05 * a.abs().max().item())


def test_a_stored_weight_is_not_told_of() -> None:
    """Calls do not quantize it, but what it is multiplied by."""
    with opfuser.quantized_model_init():
        seq = linear()
    with opfuser.watch_quantization(seq) as tensors:
        with opfuser.autocast(recipe=DELAYED):
            y = seq(torch.randn(5, 128, requires_grad=True))
        y.sum().backward()
    assert [told.role for told in tensors] == ["input", "grad_output"]

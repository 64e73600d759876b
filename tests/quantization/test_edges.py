"""Tensors that go from operation to operation as codes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.basic import norm
from opfuser.quantization.quantizers import OperandQuantizer, QuantizedTensor, Quantizer
from opfuser.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    QParams,
    Recipe,
)
from tests.quantization.test_values import CURRENT, each_recipe, error, results

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")


def gated(norm: type[nn.Module] = opfuser.RMSNorm) -> opfuser.Sequential:
    return opfuser.Residual(
        norm(128),
        opfuser.Linear(128, 512, bias=False),
        opfuser.SwiGLU(),
        opfuser.Linear(256, 128, bias=False),
    )


def plain() -> opfuser.Sequential:
    return opfuser.Residual(
        opfuser.LayerNorm(128), opfuser.Linear(128, 256), opfuser.GELU(), opfuser.Linear(256, 128)
    )


def recomputed() -> opfuser.Sequential:
    block = gated()
    block[3].recompute_mlp = True
    return block


def wide() -> opfuser.Sequential:
    """A norm of more than one dimension has other rows than the linear operation behind it."""
    return opfuser.Sequential(opfuser.RMSNorm((4, 128)), opfuser.Linear(128, 256))


BLOCKS = {"gated": gated, "plain": plain, "recomputed": recomputed, "two dimensions": wide}
FUSED = "norm_linear", "activation_linear", "activation_linear_add", "recompute_mlp_where_asked"


def edges(seq: opfuser.Sequential) -> list[str]:
    return [str(edge) for edge in seq.last_plan.edges]


@pytest.mark.parametrize("stored", [False, True], ids=["", "stored weights"])
@pytest.mark.parametrize("name", BLOCKS)
@each_recipe
def test_codes_are_those_of_operations_on_their_own(
    recipe: Recipe, name: str, stored: bool
) -> None:
    """In fp32 nothing else is rounded between operations.

    Where sums are added in another order, a code in some thousands is a neighbor.
    """
    torch.manual_seed(0)
    with opfuser.quantized_model_init(stored, recipe):
        fused = BLOCKS[name]()
    assert any(p.itemsize == 1 for p in fused.parameters()) == stored
    for parameter in fused.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.1)
    apart = copy.deepcopy(fused)
    for _ in range(3):  # delayed scaling has scales from the second call on
        x, dy = torch.randn(5, 4, 128), torch.randn(5, 4, 256 if name == "two dimensions" else 128)
        found = []
        for model, off in ((fused, ()), (apart, FUSED)):
            with opfuser.disable(*off), opfuser.autocast(recipe=recipe):
                parameters = list(model.parameters())
                found.append(results(model, x.clone().requires_grad_(), parameters, dy))
        steps = fused.last_plan.fused("forward")
        assert any(name in FUSED for name in steps)
        assert ("recompute_mlp_where_asked" in steps) == (name == "recomputed")
        assert not any(name in FUSED for name in apart.last_plan.fused("forward"))
        assert fused.last_plan.quantized == apart.last_plan.quantized
        for got, want in zip(*found, strict=True):
            assert error(got, want.double()) < 2e-3


def plan_of(seq: opfuser.Sequential, recipe: Recipe, *, grad: bool = True) -> list[str]:
    x = torch.randn(5, 4, 128, requires_grad=grad)
    with opfuser.autocast(recipe=recipe), torch.set_grad_enabled(grad):
        return [str(edge) for edge in seq.plan(x).edges]


@pytest.mark.parametrize(
    "params", [QParams(), QParams(power_2_scale=True), QParams(amax_epsilon=100.0)], ids=str
)
@pytest.mark.parametrize("name", ["gated", "plain"])
def test_backward_has_the_codes_of_the_norm_that_forward_has(
    name: str, params: QParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the largest value that forward has found, in the other layout."""
    made: list[Any] = []
    for function in ("norm_forward_quantized", "norm_cols_quantized"):
        original = getattr(norm, function)
        monkeypatch.setattr(
            norm, function, lambda *args, call=original: (made.append(call(*args)), made[-1])[1]
        )
    block, recipe = BLOCKS[name](), Float8CurrentScaling(fp8_quant_fwd_inp=params)
    with opfuser.autocast(recipe=recipe):
        y = block(torch.randn(256, 128, requires_grad=True))
    y.sum().backward()
    _measured, (forward, *_), columns = made
    assert torch.equal(columns.col_scale, forward.row_scale)
    assert torch.equal(columns.cols.view(torch.uint8).t(), forward.rows.view(torch.uint8))


def test_a_plan_says_what_is_handed_on_as_codes() -> None:
    e4m3, e5m2 = "float8_e4m3fn by rows", "float8_e5m2 by rows and columns"
    both = e4m3 + " and columns"
    forward = ["forward 1 -> 2: " + e4m3, "forward 3 -> 4: " + e4m3]
    assert plan_of(gated(), CURRENT) == [*forward, "backward 3 -> 2: " + e5m2]
    assert plan_of(gated(), CURRENT, grad=False) == []  # each operation by itself
    blocks = plan_of(gated(), Float8BlockScaling())
    assert blocks == [*forward, "backward 3 -> 2: " + both]
    # One step, listed from front to back.
    assert plan_of(recomputed(), CURRENT) == [forward[0], "backward 3 -> 2: " + e5m2, forward[1]]
    assert plan_of(wide(), CURRENT) == []
    # The bias belongs to the activation, whose kernel makes its gradient.
    assert plan_of(plain(), CURRENT)[-1] == "backward 3 -> 2: " + e5m2
    assert plan_of(gated(), Float8CurrentScaling(wgrad="bf16"))[-1] == forward[1]
    with opfuser.autocast(recipe=CURRENT):
        text = str(gated().plan(torch.ones(2, 128)))
    assert "  forward 1 -> 2, forward 3 -> 4: float8_e4m3fn by rows\n" in text


class Doubled(opfuser.BasicOperation):
    """Emits; declares nothing else."""

    emits_quantized = True
    emits_quantized_grad = True
    handed_on: list[Any]

    def op_forward(
        self,
        ctx: opfuser.OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Any:
        self.handed_on = [prev_op_grad_output_quantizer, next_op_input_quantizer]
        y = 2 * input_
        return y if next_op_input_quantizer is None else next_op_input_quantizer(y)

    def op_backward(self, ctx: opfuser.OperationContext, grad_output: Tensor) -> Any:
        self.handed_on.append(ctx.grad_input_quantizer)
        dx = 2 * grad_output
        return dx if ctx.grad_input_quantizer is None else ctx.grad_input_quantizer(dx), ()


class Square(opfuser.BasicOperation):
    """Takes; y = x² of the codes' values."""

    seen: Any = None

    def takes_quantized(self, env: Any, needs: Any) -> Quantizer | None:
        return Quantizer(OperandQuantizer(self, env.recipe), "input", rows=True, cols=False)

    def op_forward(self, ctx: opfuser.OperationContext, input_: Any, **_: Any) -> Tensor:
        self.seen = type(input_)
        x = input_.dequantize() if isinstance(input_, QuantizedTensor) else input_
        ctx.save_for_backward(x)
        return x * x

    def op_backward(self, ctx: opfuser.OperationContext, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output, ()


@each_recipe
def test_operations_of_users_emit(recipe: Recipe) -> None:
    torch.manual_seed(0)
    first, last = opfuser.Linear(128, 256), opfuser.Linear(256, 128)
    mine = opfuser.Sequential(first, Doubled(), last)
    model = opfuser.Sequential(first, opfuser.ConstantScale(2.0), last)
    x, dy = torch.randn(5, 128), torch.randn(5, 128)
    for _ in range(2):
        found = []
        for seq in (copy.deepcopy(mine), copy.deepcopy(model)):
            with opfuser.autocast(recipe=recipe):
                parameters = list(seq.parameters())
                found.append(results(seq, x.clone().requires_grad_(), parameters, dy))
            if seq[1].__class__ is Doubled:
                assert [q.role for q in seq[1].handed_on] == ["grad_output", "input", "grad_output"]
                assert len(edges(seq)) == 2
            else:  # a scale declares nothing, and gets tensors
                assert edges(seq) == []
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)
    with torch.enable_grad():
        mine(x.requires_grad_()).sum().backward()
    assert mine[1].handed_on == [None, None, None]


def test_operations_of_users_take() -> None:
    torch.manual_seed(0)
    square = Square()
    seq, x = opfuser.Sequential(Doubled(), square), torch.randn(5, 128, requires_grad=True)
    with opfuser.autocast(recipe=Float8BlockScaling()):
        y = seq(x)
    assert square.seen is QuantizedTensor
    assert edges(seq) == ["forward 0 -> 1: float8_e4m3fn by rows"]
    torch.testing.assert_close(y, 4 * x * x, rtol=0.15, atol=0.0)
    assert not torch.equal(y, 4 * x * x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, 8 * x, rtol=0.07, atol=0.0)
    seq(x)
    assert square.seen is Tensor


@each_recipe
def test_quantize_hands_on_codes(recipe: Recipe) -> None:
    """With them the linear operation computes what it computes without."""
    torch.manual_seed(0)
    linear = opfuser.Linear(128, 128)
    apart = opfuser.Sequential(copy.deepcopy(linear), copy.deepcopy(linear))
    seq = opfuser.Sequential(linear, opfuser.Quantize(True, True), copy.deepcopy(linear))
    x, dy = torch.randn(5, 128), torch.randn(5, 128)
    for _ in range(2):
        with opfuser.autocast(recipe=recipe):
            got, want = (
                results(m, x.clone().requires_grad_(), list(m.parameters()), dy)
                for m in (seq, apart)
            )
        assert len(edges(seq)) == 2
        for own, other in zip(got, want, strict=True):
            assert torch.equal(own, other)


@each_recipe
def test_quantize_rounds_where_nobody_takes_codes(recipe: Recipe) -> None:
    torch.manual_seed(0)
    seq = opfuser.Sequential(opfuser.Quantize(True, True))
    x, dy = torch.randn(5, 256, requires_grad=True), torch.randn(5, 256)
    with opfuser.autocast(recipe=recipe):
        y, dx = results(seq, x, [], dy)
    for got, true, bound in ((y, x, 2**-4), (dx, dy, 2**-3)):
        assert not torch.equal(got, true)
        torch.testing.assert_close(got, true, rtol=bound, atol=2**-10)
        assert torch.equal(opfuser.Sequential(opfuser.Quantize())(got), got)
    assert torch.equal(seq(x), x)
    number = torch.tensor(1.1, requires_grad=True)
    with opfuser.autocast(recipe=recipe):
        (y, dx) = results(seq, number, [], torch.tensor(1.0))
    torch.testing.assert_close(y, number.detach(), rtol=2**-4, atol=0.0)
    torch.testing.assert_close(dx, torch.tensor(1.0), rtol=2**-3, atol=0.0)


def test_predicted_scales_of_a_first_call_come_from_it() -> None:
    """Whatever kernel makes them: no value saturates."""
    torch.manual_seed(0)
    block = gated()
    x = 1e4 * torch.randn(5, 128)
    with opfuser.autocast(recipe=Float8PredictedScaling()):
        y = block(x)
    torch.testing.assert_close(y, opfuser.Sequential(*block)(x), rtol=0.2, atol=1.0)


@each_recipe
def test_tensors_round_trip(recipe: Recipe) -> None:
    x = torch.randn(3, 5, 128, dtype=torch.bfloat16)
    op = opfuser.BasicLinear(128, 128)
    quantizer = Quantizer(OperandQuantizer(op, recipe), "input", rows=False, cols=True)
    y = quantizer(x)
    assert (y.shape, y.dtype, y.device, y.dim(), y.numel()) == (
        x.shape, x.dtype, x.device, 3, x.numel(),
    )  # fmt: skip
    assert y.to(torch.float32).dequantize().dtype == torch.float32
    torch.testing.assert_close(y.dequantize(), x, rtol=0.07, atol=2**-9)

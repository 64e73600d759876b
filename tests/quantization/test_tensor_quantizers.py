"""Quantizers that operations answer for, and the recipe that fusion functions receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import opfuser
from opfuser.errors import ArgumentError
from opfuser.fused import ForwardLinearBiasAdd
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    Recipe,
)
from tests.kernels.codes import assert_codes, expected, padded

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DELAYED = DelayedScaling(amax_history_len=2)


def quantizers(op: Any) -> list[Any]:
    return [op.get_quantizer(*at) for at in (("forward", 0), ("forward", 1), ("backward", 0))]


def test_what_operations_have() -> None:
    linear = opfuser.BasicLinear(32, 16)
    assert (linear.num_quantizers("forward"), linear.num_quantizers("backward")) == (2, 1)
    assert quantizers(linear) == [None, None, None]
    with opfuser.autocast(recipe=DELAYED):
        found = quantizers(linear)
        assert [q.dtype for q in found] == [E4M3, E4M3, E5M2]
        assert found[0] == linear.get_input_quantizer()
        assert found[2] == linear.get_grad_output_quantizer()
        compound = opfuser.Linear(32, 16)
        assert compound.get_input_quantizer() == compound.basic_ops[0].get_quantizer("forward", 0)
        assert compound.get_grad_output_quantizer() is None  # the bias comes last
        assert opfuser.Linear(32, 16, bias=False).get_grad_output_quantizer().dtype == E5M2
        whole = ForwardLinearBiasAdd(linear=linear, bias=None, add=opfuser.AddExtraInput())
        assert whole.get_input_quantizer() == found[0]
        for op in (opfuser.GELU(), opfuser.RMSNorm(16)):
            assert (op.num_quantizers("forward"), op.num_quantizers("backward")) == (0, 0)
            assert op.get_input_quantizer() is None
            assert op.get_grad_output_quantizer() is None
        linear.recipe = None
        assert quantizers(linear) == [None, None, None]
        assert quantizers(opfuser.BasicLinear(32, 20)) == [None, None, None]
        with opfuser.autocast(enabled=False):
            assert opfuser.BasicLinear(32, 16).get_input_quantizer() is None


@pytest.mark.parametrize("at", [("forward", 2), ("backward", 1), ("forward", -1), ("sideways", 0)])
def test_others_are_an_error(at: tuple[str, int]) -> None:
    with pytest.raises(ArgumentError, match=r"'forward' or 'backward', by index \(BasicLinear\)"):
        opfuser.BasicLinear(32, 16).get_quantizer(*at)
    with pytest.raises(ArgumentError, match="num_quantizers"):
        opfuser.GELU().get_quantizer("forward", 0)


def test_scales_and_amaxes_are_those_of_the_state() -> None:
    linear = opfuser.BasicLinear(32, 16)
    seq = opfuser.Sequential(linear)
    x = torch.randn(5, 32, requires_grad=True)
    with opfuser.autocast(recipe=DELAYED):
        seq(x).backward(torch.full((5, 16), 3.0))
        q_x, q_w, q_dy = quantizers(linear)
        largest = x.abs().max(), linear.weight.abs().max(), torch.tensor(3.0)
        for q, top, amax in zip((q_x, q_w, q_dy), (448, 448, 57344), largest):
            assert q.scale.item() == pytest.approx(top / amax.item())
        assert q_x.amax.item() == x.abs().max().item()
        assert q_w.amax.item() == linear.weight.abs().max().item()
        assert q_dy.amax.item() == 3
    with opfuser.autocast(recipe=DELAYED):
        assert q_x.scale.item() == pytest.approx(448 / x.abs().max().item())
        assert q_dy.scale.item() == pytest.approx(57344 / 3)
        assert q_dy.amax.item() == 0


RECIPES: list[Recipe] = [DELAYED, Float8PredictedScaling(), Float8CurrentScaling()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_a_quantizer_quantizes_as_its_operation_would(recipe: Recipe) -> None:
    linear, x = opfuser.BasicLinear(32, 16), torch.randn(2, 5, 32)
    with opfuser.autocast(recipe=recipe):
        q = linear.get_quantizer("forward", 0)
        made = q(x)
        s = 448 / x.abs().max()
        codes = padded(expected(x.flatten(0, 1), s, E4M3))
        assert_codes(made.rows, codes, E4M3)
        assert_codes(made.cols, codes.t(), E4M3)
        assert q(x, rows=False).rows is None
        if recipe is RECIPES[2]:
            assert q.scale is None
            assert q.amax is None
        else:
            assert q.scale == s
            assert q.amax == x.abs().max()


def test_blocks_and_stored_weights_have_scales_of_their_values() -> None:
    recipe = Float8BlockScaling()
    with opfuser.quantized_model_init(recipe=recipe):
        linear = opfuser.BasicLinear(256, 128)
    with opfuser.autocast(recipe=recipe):
        q_x, q_w, q_dy = quantizers(linear)
        assert [q.scale for q in (q_x, q_w, q_dy)] == [None] * 3
        assert q_x(torch.ones(5, 256)).row_scale.shape == (2, 128)
        assert torch.equal(q_w(linear.read_weight()).row_scale, linear.weight_scale)
    with opfuser.quantized_model_init(recipe=DELAYED):
        linear = opfuser.BasicLinear(32, 128)
    with opfuser.autocast(recipe=DELAYED):
        q_x, q_w, _ = quantizers(linear)
        assert q_x.scale == 1
        assert q_w.scale is None
        made = q_w(linear.read_weight())
        assert torch.equal(made.rows.float(), linear.weight.float())


class Seen:
    """Fusion functions as te.ops has them, and what they were called with."""

    def __init__(self) -> None:
        self.recipes: list[Any] = []
        self.calls = 0

    def with_recipe(self, ops: Sequence[Any], *, recipe: Any) -> list[Any]:
        self.recipes.append(recipe)
        return list(ops)

    def with_all(self, ops: Sequence[Any], **keywords: Any) -> list[Any]:
        self.recipes.append(keywords["recipe"])
        return list(ops)

    def without(self, ops: Sequence[Any]) -> list[Any]:
        self.calls += 1
        return list(ops)


@pytest.mark.parametrize("function", ["with_recipe", "with_all", "without"])
@pytest.mark.parametrize(
    "register",
    [
        opfuser.register_forward_fusion,
        opfuser.register_backward_fusion,
        opfuser.register_forward_backward_fusion,
    ],
)
def test_fusion_functions_receive_the_recipe(register: Any, function: str) -> None:
    seen, recipe = Seen(), Float8CurrentScaling()
    seq = opfuser.Sequential(opfuser.BasicLinear(32, 16))
    x = torch.randn(5, 32, requires_grad=True)
    with register(getattr(seen, function)):
        for _ in range(2):
            seq(x)
            with opfuser.autocast(recipe=recipe):
                seq(x)
            assert seq.last_plan.quantized == (0,)
    assert (seen.recipes, seen.calls) == (([], 2) if function == "without" else ([None, recipe], 0))

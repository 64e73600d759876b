from __future__ import annotations

import pytest
import torch

import opfuser
from opfuser import AddExtraInput, BasicLinear, ConstantScale, OperationContext, Sequential
from opfuser.fused import BackwardLinearScale
from opfuser.op import GradNeeds
from tests.fused.pairings import (
    DTYPES,
    LAYOUTS,
    Case,
    check_pairings,
    plan_of,
    stopped_by,
    with_subclass,
)
from tests.fused.sharded import hand_built, refusals_when_sharded

NAME = "backward_linear_scale"


def scaled(scale: float) -> Case:
    return Case(lambda: [BasicLinear(6, 4), ConstantScale(scale)], 6, (), {}, {NAME: 1})


SEVERAL = Case(
    lambda: [
        ConstantScale(2.0),
        BasicLinear(6, 5),
        ConstantScale(0.3),
        ConstantScale(0.7),
        BasicLinear(5, 4),
        ConstantScale(-3),
    ],
    6,
    (),
    {},
    {NAME: 2},
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairings(dtype: torch.dtype, layout: str) -> None:
    check_pairings(scaled(0.3), dtype, LAYOUTS[layout])


@pytest.mark.parametrize("scale", [0.0, 1, -2.5, 1e-3])
def test_scales(scale: float) -> None:
    check_pairings(scaled(scale), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_again_and_inside_longer_sequences(dtype: torch.dtype) -> None:
    check_pairings(SEVERAL, dtype)


@pytest.mark.parametrize(("frozen", "input_grad"), [(["0.weight"], True), ([], False)])
def test_gradients_that_nobody_needs(frozen: list[str], input_grad: bool) -> None:
    check_pairings(scaled(0.3), torch.float32, frozen=frozen, input_grad=input_grad)


def test_autocast() -> None:
    check_pairings(SEVERAL, torch.float32, autocast=torch.bfloat16)


@pytest.mark.parametrize("input_dtype", DTYPES, ids=str)
def test_input_of_another_dtype_than_the_weight(input_dtype: torch.dtype) -> None:
    check_pairings(scaled(0.3), torch.float32, input_dtype=input_dtype)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_main_grad(dtype: torch.dtype, input_grad: bool, overwrite: bool) -> None:
    seq = Sequential(BasicLinear(6, 4, accumulate_into_main_grad=True), ConstantScale(0.3))
    w = seq[0].weight
    x = torch.randn(3, 6, requires_grad=input_grad)
    dy, start = torch.randn(3, 4), torch.randn(4, 6)
    start = start.to(dtype).float()
    w.main_grad = start.to(dtype, copy=True)
    w.overwrite_main_grad = overwrite
    assert seq.plan(x).fused("backward") == {NAME: 1}
    seq(x).backward(dy)
    want = 0.3 * dy.t() @ x.detach() + (0 if overwrite else start)
    torch.testing.assert_close(
        w.main_grad, want.to(dtype), rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    if input_grad:
        torch.testing.assert_close(x.grad, 0.3 * dy @ w)
    assert w.grad_added_to_main_grad
    assert w.grad.data_ptr() != w.main_grad.data_ptr()


@pytest.mark.parametrize(("at", "code"), [(0, None), (1, "SUBCLASS")])
def test_a_subclass_is_not_matched(at: int, code: str | None) -> None:
    plan = plan_of(*with_subclass([BasicLinear(6, 4), ConstantScale(2.0)], at))
    assert plan.fused("backward") == {}
    assert stopped_by(plan, NAME) == code


def test_sharding_is_refused_where_the_backward_communicates() -> None:
    assert refusals_when_sharded(NAME, lambda linear: [linear, ConstantScale(2.0)]) == {
        "column": "tensor-parallel BasicLinear in column mode communicates right after its "
        "input-gradient GEMM",
        "column, sequence-parallel": "sequence-parallel BasicLinear in column mode communicates "
        "right after its input-gradient GEMM",
        "row": None,
        "row, sequence-parallel": "sequence-parallel BasicLinear in row mode communicates before "
        "its gradient GEMMs",
    }


def test_placed_by_hand() -> None:
    linear, scale = BasicLinear(6, 4), ConstantScale(0.5)
    fused = BackwardLinearScale(scale=scale, linear=linear)
    assert list(fused.basic_ops) == [linear, scale]
    x = torch.randn(3, 6, requires_grad=True)
    Sequential(fused)(x).sum().backward()
    torch.testing.assert_close(linear.weight.grad, 0.5 * x.detach().sum(0).expand(4, 6))
    torch.testing.assert_close(x.grad, 0.5 * linear.weight.detach().sum(0).expand(3, 6))


@pytest.mark.parametrize("residual", [False, True])
def test_scale_of_the_backward_is_that_of_its_forward(residual: bool) -> None:
    linear, scale = BasicLinear(6, 4), ConstantScale(0.5)
    seq = Sequential(linear, scale, *([AddExtraInput()] if residual else []))
    x = torch.randn(3, 6, requires_grad=True)
    extras = (torch.zeros(3, 4),) * residual
    plan = seq.plan(x, *extras)
    assert plan.fused("backward") == {NAME: 1}
    assert plan.fused("forward") == ({"forward_linear_scale_add": 1} if residual else {})
    y = seq(x, *extras)
    scale.scale = 100.0
    y.sum().backward()
    torch.testing.assert_close(linear.weight.grad, 0.5 * x.detach().sum(0).expand(4, 6))
    torch.testing.assert_close(x.grad, 0.5 * linear.weight.detach().sum(0).expand(3, 6))


def test_after_a_forward_that_left_no_scale() -> None:
    linear, scale = BasicLinear(6, 4), ConstantScale(0.5)
    ctxs = [OperationContext(), OperationContext()]
    x, w, dy = torch.randn(3, 6), linear.weight.detach(), torch.randn(3, 4)
    ctxs[0].needs, ctxs[0].saved_tensors = GradNeeds(True, (True,), ()), (x, w)
    dx, grads, _ = BackwardLinearScale(scale=scale, linear=linear).fuser_backward(
        ctxs, dy, basic_op_grad_extra_outputs=[(), ()]
    )
    torch.testing.assert_close(dx, 0.5 * dy @ w)
    torch.testing.assert_close(grads[0], (0.5 * dy.t() @ x,))


def test_switched_off() -> None:
    with opfuser.disable(NAME):
        assert plan_of(*scaled(0.3).ops()).fused("backward") == {}


def test_sharding_is_refused_by_the_constructor_too() -> None:
    raised = hand_built(lambda linear: BackwardLinearScale(scale=ConstantScale(2.0), linear=linear))
    assert [name for name, text in raised.items() if text is None] == ["row"]
    assert "(BackwardLinearScale). Leave the operations separate" in raised["column"]

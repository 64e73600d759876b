from __future__ import annotations

import pytest
import torch
from torch import nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, L2Normalization, Sequential
from opfuser.basic.activation import GELU, QGELU, ReLU, Sigmoid, SiLU, Softplus, SReLU, Tanh
from opfuser.fused import BackwardActivationBias
from opfuser.kernels import activation_plain, cpu_blocks
from opfuser.kernels.launch import INTERPRETED
from opfuser.op import GradNeeds, OperationContext
from tests.fused.pairings import (
    DTYPES,
    LAYOUTS,
    Case,
    build,
    check_pairings,
    plan_of,
    stopped_by,
    with_subclass,
)

NAME = "backward_activation_bias"
in_plain_torch = pytest.mark.skipif(
    INTERPRETED, reason="where kernels run, nothing is done block by block"
)
ACTIVATIONS = [GELU, QGELU, ReLU, SReLU, SiLU, Softplus, Tanh, Sigmoid]


def biased(activation: type[nn.Module]) -> Case:
    return Case(lambda: [Bias(6), activation()], 6, (), {}, {NAME: 1})


SEVERAL = Case(
    lambda: [BasicLinear(6, 4), Bias(4), SiLU(), Bias(4), Bias(4), ReLU(), L2Normalization()],
    6,
    (),
    {"forward_linear_bias_activation": 1},
    {NAME: 2},
)


THEN_SUM = Case(lambda: [Bias(6), GELU(), AddExtraInput()], 6, (6,), {}, {NAME: 1})
"""Under autocast the gradient of a sum with fp32 is fp32, that of the activation is not."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_pairings(activation: type[nn.Module], dtype: torch.dtype) -> None:
    check_pairings(biased(activation), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype: torch.dtype, layout: str) -> None:
    check_pairings(biased(GELU), dtype, LAYOUTS[layout])


@pytest.fixture
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks of so few rows that the tensors here count as large; notes each use of them."""
    uses: list[int] = []
    monkeypatch.setattr(cpu_blocks, "BLOCK", 6 * request.param)
    monkeypatch.setattr(activation_plain, "_MIN_BLOCKS", 1e-3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: uses.append(1) or 1)
    return uses


@in_plain_torch
@pytest.mark.parametrize("small_blocks", [1, 3, 100], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_block_by_block(activation: type[nn.Module], layout: str, small_blocks: list[int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_pairings(biased(activation), dtype, LAYOUTS[layout])
    assert small_blocks or layout == "vector" or "zero rows" in layout


@in_plain_torch
@pytest.mark.parametrize("small_blocks", [2], indirect=True)
def test_block_by_block_under_autocast(small_blocks: list[int]) -> None:
    check_pairings(THEN_SUM, torch.float32, autocast=torch.bfloat16)
    assert small_blocks


@in_plain_torch
@pytest.mark.parametrize("small_blocks", [2], indirect=True)
def test_block_by_block_with_rows_saved_flat(small_blocks: list[int]) -> None:
    """As forward fusions written for te.ops save them."""
    x, dy = torch.randn(6, 4), torch.randn(2, 3, 4)
    ctxs = [OperationContext(), OperationContext()]
    ctxs[0].needs = GradNeeds(True, (True,), ())
    ctxs[1].saved_tensors = (x,)
    fused = BackwardActivationBias(bias=Bias(4), activation=ReLU())
    with torch.no_grad():
        dx, [(db,), ()], _ = fused.fuser_backward(ctxs, dy, basic_op_grad_extra_outputs=[(), ()])
    want = dy * (x > 0).view(2, 3, 4)
    assert small_blocks
    assert torch.equal(dx, want)
    torch.testing.assert_close(db, want.sum((0, 1)))


@in_plain_torch
def test_a_large_tensor() -> None:
    torch_threads = torch.get_num_threads()
    rows = 2**21 * torch_threads // 1024 + 3
    seq = Sequential(Bias(1024), ReLU()).bfloat16()
    x = torch.randn(rows, 1024, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, 1024, dtype=torch.bfloat16)
    dx, db = torch.autograd.grad(seq(x), [x, seq[0].bias], dy)
    want = dy * (x > 0)
    assert torch.equal(dx, want)
    exact = want.double().sum(0)
    assert (db.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_again_and_inside_longer_sequences(dtype: torch.dtype) -> None:
    check_pairings(SEVERAL, dtype)


@pytest.mark.parametrize(("frozen", "input_grad"), [(["0.bias"], True), ([], False)])
def test_gradients_that_nobody_needs(frozen: list[str], input_grad: bool) -> None:
    check_pairings(biased(SiLU), torch.float32, frozen=frozen, input_grad=input_grad)
    check_pairings(SEVERAL, torch.float32, input_grad=input_grad)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_no_work_for_gradients_that_nobody_needs(needs: tuple[bool, bool]) -> None:
    ops = [Bias(6), SiLU()]
    fused = BackwardActivationBias(bias=ops[0], activation=ops[1])
    ctxs = [OperationContext(), OperationContext()]
    ctxs[0].needs = GradNeeds(needs[0], (needs[1],), ())
    ctxs[1].saved_tensors = (torch.randn(3, 6),)
    with torch.no_grad():
        dx, [(db,), ()], [(), ()] = fused.fuser_backward(
            ctxs, torch.randn(3, 6), basic_op_grad_extra_outputs=[(), ()]
        )
    assert (dx is not None, db is not None) == needs


def test_autocast() -> None:
    check_pairings(SEVERAL, torch.float32, autocast=torch.bfloat16)
    check_pairings(biased(GELU), torch.float32, autocast=torch.bfloat16)
    check_pairings(THEN_SUM, torch.float32, autocast=torch.bfloat16)


@pytest.mark.parametrize("input_dtype", DTYPES, ids=str)
def test_input_of_another_dtype_than_the_bias(input_dtype: torch.dtype) -> None:
    check_pairings(biased(SiLU), torch.float32, input_dtype=input_dtype)


def test_cleared_bias() -> None:
    seq = build(biased(SiLU), torch.float32)
    seq[0].bias = None
    x = torch.randn(3, 6, requires_grad=True)
    assert seq.plan(x).fused("backward") == {NAME: 1}
    got = torch.autograd.grad(seq(x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(nn.functional.silu(x).sum(), x))


@pytest.mark.parametrize(("at", "code"), [(0, None), (1, "SUBCLASS")])
def test_a_subclass_is_not_matched(at: int, code: str | None) -> None:
    plan = plan_of(*with_subclass([Bias(6), SiLU()], at))
    assert plan.fused("backward") == {}
    assert stopped_by(plan, NAME) == code


def test_a_gated_activation_is_not_matched() -> None:
    assert plan_of(Bias(6), opfuser.SwiGLU()).fused("backward") == {}


def test_refused_where_the_bias_is_frozen_and_comes_first() -> None:
    bias = Bias(6)
    bias.bias.requires_grad_(False)
    plan = plan_of(bias, SiLU(), BasicLinear(6, 4), grad=False)
    assert [why.code for _, why in plan.record(NAME).refusals] == ["NO_GRAD"]


def test_placed_by_hand() -> None:
    bias, activation = Bias(6), SiLU()
    fused = BackwardActivationBias(bias=bias, activation=activation)
    assert list(fused.basic_ops) == [bias, activation]
    x = torch.randn(3, 6, requires_grad=True)
    Sequential(fused)(x).sum().backward()
    (want,) = torch.autograd.grad(nn.functional.silu(x).sum(), x)
    torch.testing.assert_close(x.grad, want)
    torch.testing.assert_close(bias.bias.grad, want.sum(0))
    assert x.grad.data_ptr() != bias.bias.grad.data_ptr()


def test_switched_off() -> None:
    with opfuser.disable(NAME):
        assert plan_of(Bias(6), SiLU()).fused("backward") == {}

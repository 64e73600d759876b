"""What goes into a norm's kernel; for values tests/kernels/numerics/test_chains_in_sequences.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opfuser import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    Dropout,
    LayerNorm,
    MakeExtraOutput,
    RMSNorm,
    SiLU,
    SwiGLU,
)
from opfuser.engine.plan import Plan
from opfuser.errors import NotSupportedError
from opfuser.fused import NormLinear, PointwiseNorm
from opfuser.fused.pointwise_norm import FUSION
from opfuser.kernels import launch
from tests.fused.examples import Cube, plan_on

pytest.importorskip("triton", reason="Triton exists for Linux only")
pytestmark = pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter's kernels run anywhere")
NAME = FUSION.name
TO_GEMM = "CONFLICT: left to the linear operation that may stand before it"


def steps(*ops: nn.Module, grad: bool = True) -> list[tuple[str, tuple[int, ...]]]:
    """The fused operations of both passes, and what they cover."""
    with torch.set_grad_enabled(grad):
        plan = plan_on("meta", *ops)
    joint = [(type(step.op).__name__, step.indices) for step in plan.forward if step.fusion]
    if grad:
        assert [step.indices for step in plan.backward if step.fusion] == [at for _, at in joint]
    return joint


def refusals(plan: Plan) -> list[tuple[int, str]]:
    assert plan.fused("forward").get(NAME) is None
    return [(at, str(why)) for at, why in plan.record(NAME).refusals]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "ops",
    [
        [Bias(6), Dropout(0.1), AddExtraInput(), MakeExtraOutput(), LayerNorm(6)],
        [Dropout(0.1), AddExtraInput(), RMSNorm(6)],
        [Bias(6), AddExtraInput(), MakeExtraOutput(), RMSNorm(6)],
        [AddExtraInput(), Dropout(0.1), RMSNorm(6)],
        [Dropout(0.1).eval(), AddExtraInput(), RMSNorm(6)],
        [Dropout(0.1), LayerNorm(6)],
        [SiLU(), MakeExtraOutput(), RMSNorm(6)],
        [Cube(), RMSNorm(6)],
        [ConstantScale(2.0), Bias(6), GELU(), Cube(), AddExtraInput(), Dropout(0.2), RMSNorm(6)],
    ],
    ids=lambda ops: "+".join(type(op).__name__ for op in ops),
)
def test_matches(ops: list[nn.Module], grad: bool) -> None:
    whole = tuple(range(len(ops)))
    assert steps(*ops, grad=grad) == [("PointwiseNorm", whole)]
    moved = tuple(i + 1 for i in whole)
    assert steps(BasicLinear(6, 6), *ops, SwiGLU(), grad=grad) == [("PointwiseNorm", moved)]


@pytest.mark.parametrize("tap", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_linear_operation_behind_the_norm_joins(bias: bool, tap: bool) -> None:
    run = [Bias(6), Dropout(0.1), AddExtraInput(), *[MakeExtraOutput()] * tap, LayerNorm(6)]
    ops = [*run, BasicLinear(6, 12), *[Bias(12)] * bias]
    assert steps(*ops, SwiGLU()) == [("NormLinear", tuple(range(len(ops))))]
    # Without a gradient there is nothing to save.
    joint = steps(*ops, SwiGLU(), grad=False)
    assert joint[0] == ("PointwiseNorm", tuple(range(len(run))))


def test_a_tap_before_the_run_stays_out() -> None:
    ops = [MakeExtraOutput(), SiLU(), RMSNorm(6), BasicLinear(6, 6)]
    assert steps(*ops) == [("NormLinear", (1, 2, 3))]
    record = plan_on("meta", *ops).record("norm_linear")
    assert [(at, str(why)) for at, why in record.refusals] == [
        (0, "LAYOUT: the run before the norm is not the first of the operations")
    ]


def test_a_tap_inside_the_run_ends_it() -> None:
    ops = [Dropout(0.1), SiLU(), MakeExtraOutput(), Bias(6), SiLU(), RMSNorm(6)]
    assert steps(*ops) == [("PointwiseChain", (0, 1)), ("PointwiseNorm", (3, 4, 5))]
    plan = plan_on("meta", Dropout(0.1), MakeExtraOutput(), SwiGLU(), RMSNorm(3))
    assert str(plan.record(NAME).near_miss) == (
        "closest: 2 of 3 at op 0; LAYOUT: RMSNorm|LayerNorm is expected where SwiGLU stands"
    )


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ([Bias(6)], TO_GEMM),
        ([ConstantScale(2.0)], TO_GEMM),
        ([ConstantScale(2.0), AddExtraInput()], TO_GEMM),
        ([Dropout(0.0), Bias(6)], TO_GEMM),
        ([AddExtraInput()], "CONFLICT: left to the fusions of a sum and a norm"),
        ([Dropout(0.0)], "LAYOUT: none of the operations before the norm changes anything"),
        ([Bias(6)] * 8, "LAYOUT: kernels take 7 tensors besides x and y, not more"),
    ],
    ids=lambda ops: "+".join(type(op).__name__ for op in ops) if isinstance(ops, list) else "",
)
def test_refused_runs(ops: list[nn.Module], expected: str) -> None:
    plan = plan_on("meta", BasicLinear(6, 6), *ops, MakeExtraOutput(), LayerNorm(6))
    assert str(plan.record(NAME).refusals[0][1]) == expected


def test_what_is_left_of_a_run_that_is_too_long() -> None:
    ops = [SiLU(), *[Bias(6) for _ in range(8)], RMSNorm(6)]
    norm = "PointwiseNorm", tuple(range(2, 10))
    assert steps(*ops) == [("PointwiseChain", (0, 1)), norm]


def test_a_norm_over_several_dimensions() -> None:
    ops = [Bias(6), Dropout(0.1), AddExtraInput(), RMSNorm((3, 6))]
    plan = plan_on("meta", *ops)
    why = "LAYOUT: the norm is over several dimensions, the kernel over one"
    assert refusals(plan) == [(at, why) for at in range(3)]
    assert plan.fused("forward") == {"pointwise_chain": 1}


def test_placed_by_hand_it_runs_on_its_own() -> None:
    fused = PointwiseNorm(before=[SiLU()], norm=RMSNorm(6))
    plan = plan_on("meta", fused, BasicLinear(6, 4))
    assert plan.forward[0].op is fused
    assert [(at, str(why)) for at, why in plan.record("norm_linear").refusals] == [
        (0, "LAYOUT: PointwiseNorm was placed by hand, and runs on its own")
    ]


def test_refuses_what_is_no_element_wise_operation() -> None:
    odd = r" is not an element-wise operation with a kernel \(PointwiseNorm\)"
    with pytest.raises(NotSupportedError, match="^SwiGLU" + odd):
        PointwiseNorm(before=[Bias(6), SwiGLU()], norm=RMSNorm(3))
    with pytest.raises(NotSupportedError, match="^MakeExtraOutput" + odd):
        PointwiseNorm(before=[MakeExtraOutput(), Dropout(0.1)], norm=RMSNorm(6))
    with pytest.raises(NotSupportedError, match=r"^kernels take 7 tensors besides x and y"):
        PointwiseNorm(before=[Bias(6) for _ in range(8)], norm=RMSNorm(6))


@pytest.mark.parametrize("before", [{"add": AddExtraInput()}, {"make_extra": MakeExtraOutput()}])
def test_a_linear_operation_takes_nothing_before_the_run(before: dict[str, Any]) -> None:
    norm = PointwiseNorm(before=[Dropout(0.1)], norm=RMSNorm(6))
    text = r"^the run before the norm is not the first of the operations \(NormLinear\)"
    with pytest.raises(NotSupportedError, match=text):
        NormLinear(norm=norm, linear=BasicLinear(6, 4), **before)

"""What becomes a chain; what it computes: tests/kernels/numerics/test_chains_in_sequences.py."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opfuser import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    Dropout,
    Linear,
    MakeExtraOutput,
    ReLU,
    RMSNorm,
    SiLU,
    Softplus,
    SwiGLU,
    Tanh,
)
from opfuser.engine.plan import Plan
from opfuser.errors import NotSupportedError
from opfuser.fused.pointwise_chain import FUSION, PointwiseChain
from opfuser.kernels import launch
from tests.fused.examples import Cube, plan_on

pytest.importorskip("triton", reason="Triton exists for Linux only")
pytestmark = pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter's kernels run anywhere")
NAME = FUSION.name


def runs(*ops: nn.Module, grad: bool = True) -> list[tuple[int, ...]]:
    """The runs of operations that become chains."""
    with torch.set_grad_enabled(grad):
        plan = plan_on("meta", *ops)
    found = [step.indices for step in plan.forward if step.fusion == NAME]
    if grad:
        assert found == [step.indices for step in plan.backward if step.fusion == NAME]
    return found


def refusal(plan: Plan) -> tuple[str, str]:
    assert plan.fused("forward").get(NAME) is None
    return plan.record(NAME).refusals[0][1]


@pytest.mark.parametrize(
    "ops",
    [
        [Bias(6), GELU()],
        [SiLU(), Bias(6)],
        [Dropout(0.1), AddExtraInput()],
        [ConstantScale(2.0), Cube()],
        [Bias(6), Bias(6)],
        [AddExtraInput(), ReLU(), AddExtraInput(), Softplus(), Dropout(0.2), Tanh()],
    ],
    ids=lambda ops: "+".join(type(op).__name__ for op in ops),
)
def test_matches(ops: list[nn.Module]) -> None:
    whole = tuple(range(len(ops)))
    assert runs(*ops) == [whole]
    assert runs(*ops, grad=False) == [whole]
    moved = tuple(i + 1 for i in whole)
    assert runs(BasicLinear(6, 6), *ops, MakeExtraOutput()) == [moved]


def test_runs_end_at_other_operations() -> None:
    ops = [Bias(12), SwiGLU(), Bias(6), SiLU(), MakeExtraOutput(), Dropout(0.1), Cube()]
    assert runs(BasicLinear(6, 12), *ops) == [(3, 4), (6, 7)]


def test_a_users_operation_between_linear_and_dropout() -> None:
    assert runs(Linear(6, 6), Cube(), Dropout(0.1), Linear(6, 6)) == [(1, 2, 3)]


def own(method: str) -> type[Cube]:
    """A class that has that method of its own, and does the same."""

    def same(self: Cube, *args: Any, **kwargs: Any) -> Any:
        return getattr(Cube, method)(self, *args, **kwargs)

    return type("Own", (Cube,), {method: same})


class WithoutDeviceFunction(Cube):
    device_function = None


class WithParameter(Cube):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "kind",
    [
        *map(own, ("op_forward", "op_backward", "fuser_forward", "fuser_backward")),
        WithoutDeviceFunction,
        WithParameter,
    ],
)
def test_a_users_operation_that_a_kernel_would_get_wrong(kind: type[Cube]) -> None:
    assert runs(kind(), SiLU(), Bias(6)) == [(1, 2)]


def test_a_users_operation_may_be_derived_further() -> None:
    class Deeper(Cube):
        def value(self, x: Tensor) -> Tensor:
            return x * x * x

    assert runs(Deeper(), SiLU()) == [(0, 1)]


# What holds for a chain alone and for one before a norm.

BEHIND: dict[str, list[nn.Module]] = {NAME: [], "pointwise_norm": [RMSNorm(6)]}
with_and_without_a_norm = pytest.mark.parametrize("name", BEHIND)


@with_and_without_a_norm
def test_refused_without_kernels(name: str) -> None:
    run = [Bias(6), SiLU(), *BEHIND[name]]
    for device, dtype, why in (
        ("cpu", torch.float32, "DEVICE: there is no kernel for cpu"),
        ("meta", torch.float64, "DTYPE: there is no kernel for fp64"),
    ):
        record = plan_on(device, *run, dtype=dtype).record(name)
        assert not record.matches
        assert str(record.refusals[0][1]) == f"{why}; the steps would be the same"


@with_and_without_a_norm
def test_refused_where_only_its_end_needs_a_gradient(name: str) -> None:
    record = plan_on("meta", SiLU(), *(BEHIND[name] or [Bias(6)]), grad=False).record(name)
    assert [str(why) for _, why in record.refusals] == [
        "NO_GRAD: the first operation that needs a gradient lies inside it"
    ]


@with_and_without_a_norm
def test_skipped_without_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("opfuser.core.fusion")
    monkeypatch.setattr(module, "installed", lambda package: False)
    record = plan_on("meta", Bias(6), SiLU(), *BEHIND[name]).record(name)
    assert (record.status, record.detail) == ("skipped", "needs the package triton")


def test_left_to_the_gemm_before_them() -> None:
    for before in (Bias(6), ConstantScale(2.0)):
        plan = plan_on("meta", BasicLinear(6, 6), before, AddExtraInput())
        assert refusal(plan).code == "CONFLICT"
        assert len(plan.forward) == 1
    assert runs(BasicLinear(6, 6), Bias(6), ConstantScale(2.0), AddExtraInput()) == [(1, 2, 3)]


def test_refused_where_too_little_is_computed() -> None:
    for idle in (Dropout(0.0), Dropout(0.3).eval()):
        assert refusal(plan_on("meta", Bias(6), idle)).code == "LAYOUT"
        assert runs(Bias(6), idle, SiLU()) == [(0, 1, 2)]


def test_as_many_tensors_as_kernels_take() -> None:
    plan = plan_on("meta", *[Bias(6) for _ in range(8)])
    detail = plan.record(NAME).refusals[0][1].detail
    assert detail == "kernels take 7 tensors besides x and y, not more"
    assert runs(*[Bias(6) for _ in range(7)]) == [tuple(range(7))]
    assert runs(SiLU(), *[AddExtraInput() for _ in range(4)]) == [(2, 3, 4)]


def test_a_copy_has_numbers_of_its_own() -> None:
    fused, x = PointwiseChain([SiLU(), ConstantScale(0.5)]), torch.randn(4, 6)
    want, twin = fused(x), copy.deepcopy(fused)
    twin.basic_ops[1].scale = 0.0
    assert not torch.equal(twin(x), want)
    assert torch.equal(fused(x), want)


def test_refuses_what_is_no_element_wise_operation() -> None:
    with pytest.raises(
        NotSupportedError, match=r"^SwiGLU is not an element-wise operation with a kernel "
    ):
        PointwiseChain([Bias(6), SwiGLU()])
    with pytest.raises(NotSupportedError, match=r"^kernels take 7 tensors besides x and y"):
        PointwiseChain([Bias(6) for _ in range(8)])

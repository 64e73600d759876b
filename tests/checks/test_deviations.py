"""What the checks say about a deviation: how large, where, and which step made it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, ConstantScale, MakeExtraOutput
from opfuser.testing import check_fusion, check_op
from opfuser.testing.compare import deviation
from tests.checks.spoilt import Gain, LinearScaleGain, Scaled, operations, rule, spoilt, with_bias
from tests.checks.test_wrong_results import with_dw, with_dx


def text(check: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as error:
        check(*args, **kwargs)
    return str(error.value)


def of_fusion(stage: Any, ops: list[nn.Module], *extras: Tensor, **methods: Any) -> str:
    """What check_fusion says about a fusion with these steps in place of right ones."""
    fusion = rule(stage, spoilt(LinearScaleGain, **methods))
    return text(check_fusion, fusion, ops, torch.randn(5, 4), *extras)


def step(said: str) -> str:
    """The sentence about the step, without the figures."""
    return said[said.index("The first step") :].partition(", with")[0]


def too_large(at: tuple[int, int]) -> Any:
    """Adds 0.25 to one element of the output, where there are as many rows."""

    def compute(op: Any, ctx: Any, x: Tensor) -> Tensor:
        y: Tensor = op.right(x)
        if at[0] < y.shape[0]:
            y[at] += 0.25
        return y

    return compute


def test_the_largest_deviation_of_an_operation() -> None:
    def compute(op: Any, ctx: Any, x: Tensor) -> Tensor:
        y: Tensor = op.right(x)
        y[2, 0] += 0.125
        y[1, 2] -= 0.5
        return y

    x = torch.ones(5, 3)
    assert text(check_op, spoilt(Scaled, compute=compute)(), x) == (
        "The output is wrong: error 0.5, allowed 9.54e-07 (Scaled(), input float32 [5, 3]). "
        "Received: -1.5 at [1, 2] where -1 is expected and plain torch has -1; 2 of 15 elements "
        "deviate (torch.float32, shape (5, 3), magnitude 2); allowed is 2 x 0 (plain torch) + "
        "9.54e-07 (floor)."
    )


def test_a_deviation_of_a_fusion_names_the_step() -> None:
    said = of_fusion("forward", [*with_bias(), Bias(3)], compute=too_large((2, 1)))
    assert said.startswith("The output is wrong: error 0.25, allowed ")
    assert " (fusion 'mine', input float32 [5, 4], forward fused). Received: " in said
    assert " at [2, 1] where " in said
    assert "; 1 of 15 elements deviate (torch.float32, shape (5, 3), magnitude " in said
    assert said.endswith(" of its output.")
    names = "ops 1-3 BasicLinear + ConstantScale + Gain [mine]"
    assert f"The first step that deviates is in forward: {names}, with error 0.25, allow" in said


def twice() -> list[nn.Module]:
    return [*operations(), BasicLinear(3, 3), ConstantScale(0.5), Gain()]


def test_of_several_wrong_steps_it_is_the_first_of_its_pass() -> None:
    said = of_fusion("joint", twice(), compute=lambda op, ctx, x: op.right(x) * 1.5)
    assert step(said).startswith("The first step that deviates is in forward: ops 0-2 ")
    said = of_fusion("backward", twice(), grads=with_dx(lambda dx: dx * 1.5))
    assert step(said).startswith("The first step that deviates is in backward: ops 3-5 ")


def test_a_gradient_that_is_wrong_further_on_is_traced_back() -> None:
    """That of the bias in front is wrong, because of the step behind it."""
    ops = [Bias(4), ConstantScale(2.0), *operations()]
    said = of_fusion("joint", ops, grads=with_dx(lambda dx: dx * 1.5))
    assert said.startswith("The gradient of input is wrong")
    assert " of the gradient of the input of op 2." in said
    said = of_fusion("joint", ops, grads=with_dw(lambda dw: dw * 1.5))
    assert said.startswith("The gradient of parameter 2.weight is wrong")
    assert " of the gradient of weight of op 2." in said


def test_extra_tensors_on_the_way() -> None:
    """Through a channel, and from the caller."""
    ops = [opfuser.Residual(Bias(4)), AddExtraInput(), MakeExtraOutput(), *operations(), Bias(3)]
    said = of_fusion("joint", ops, torch.randn(5, 4), grads=with_dx(lambda dx: dx * 1.5))
    assert step(said).endswith("backward: ops 5-7 BasicLinear + ConstantScale + Gain [mine]")
    assert " of the gradient of the input of op 5." in said


@pytest.mark.parametrize(
    "methods",
    [
        {"compute": lambda op, ctx, x: op.right(x) * (1 if op.trains() else 1.5)},
        {"compute": lambda op, ctx, x: op.right(x) * (1 if ctx.requires_grad else 1.5)},
        {"compute": lambda op, ctx, x: op.right(x) * (1 if x.shape[0] > 1 else 1.5)},
        {"saved": lambda op, ctx: (ctx.saved_tensors[0], op.weight())},
        {"compute": lambda op, ctx, x: op.right(x.as_strided(x.shape, (x.shape[-1], 1)))},
    ],
    ids=["eval mode", "no gradients", "one row", "replaced parameters", "strides"],
)
def test_the_step_is_called_as_it_was(methods: Any) -> None:
    # Strides are those of the caller's tensor only if nothing stands in front.
    ops = operations() if "saved" not in methods else with_bias()
    said = of_fusion("joint", ops, **methods)
    assert step(said).endswith("BasicLinear + ConstantScale + Gain [mine]")


def test_a_missing_gradient() -> None:
    said = of_fusion("backward", with_bias(), grads=with_dx(lambda dx: None))
    assert "Received: no gradient at [" in said


def test_what_only_a_call_shows_is_said_so() -> None:
    """A neighbor sets the factor while the sequence runs; steps alone see the new one."""

    def capture(self: Any, linear: Any, scale: Any, gain: Any) -> None:
        self.kept = scale.scale

    said = of_fusion("joint", with_bias(), capture=capture, scale=lambda op, ctx=None: op.kept)
    assert said.endswith("Run one after the other, outside of a call, all steps agree.")


def test_scalars_have_no_place() -> None:
    class Sum(opfuser.Identity):
        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            ctx.shape = input_.shape
            return input_.sum() + 1

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output.expand(ctx.shape), ()

        def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
            return input_.sum()

    said = text(check_op, Sum(), torch.ones(2, 2), zero_rows=False)
    assert "Received: 5 where 4 is expected and plain torch has 4; 1 of 1 elements deviate" in said


@pytest.mark.parametrize(
    ("ours", "exact", "found"),
    [
        ([1.0, 2.0], [1.0, 2.5], (0.5, (1,), 1)),
        ([1.0, float("nan")], [9.0, 2.5], (float("nan"), (1,), 2)),
        ([float("inf"), 1.0], [float("inf"), 1.0], (0.0, (0,), 0)),
        ([float("inf"), 1.0], [float("-inf"), 1.0], (float("inf"), (0,), 1)),
    ],
)
def test_the_largest_deviation(ours: Any, exact: Any, found: tuple[Any, ...]) -> None:
    right = torch.tensor(exact, dtype=torch.float64)
    d = deviation(torch.tensor(ours), right, right, 2.0, 0.0)
    assert str((d.error, d.at, d.wrong)) == str(found)
    assert d.is_wrong == (d.wrong > 0)


def test_integers_are_exact_and_empty_tensors_right() -> None:
    ints = torch.tensor([3, 4])
    assert deviation(ints, ints, ints + 1, 2.0, 9.0).is_wrong
    empty = torch.zeros(0, 3)
    assert not deviation(empty, empty, empty.double(), 2.0, 0.0).is_wrong

"""Hazards 4 and 5: a fusion that is applied where it no longer, or never, holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, against, close, fill, rand


class HalfLinearScale(of.FusedOperation):
    """Computes in bf16, and counts how often it does: right for bf16 operands only."""

    calls = 0

    def __init__(self, linear: of.BasicLinear, scale: of.ConstantScale) -> None:
        super().__init__([linear, scale])

    def fuser_forward(
        self, basic_op_ctxs: list[of.OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, list[tuple[()]]]:
        linear, scale = self.basic_ops
        weight = linear.weight
        type(self).calls += 1
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, weight)
        y = F.linear(input_.bfloat16(), weight.bfloat16()) * scale.scale
        return y.to(input_.dtype), [(), ()]


def fuse_by_weight(ops: list[of.FusibleOperation], **unused: Any) -> list[of.FusibleOperation]:
    """A fusion function as te.ops has them, which decides by the dtype of the weight."""
    linear, scale = ops
    if isinstance(linear, of.BasicLinear) and linear.weight.dtype == torch.bfloat16:
        return [HalfLinearScale(linear, scale)]  # type: ignore[arg-type]
    return ops


def _refuses(linear: of.BasicLinear, scale: of.ConstantScale, *, env: Any) -> of.Refusal | None:
    if env.compute_dtype == torch.bfloat16:
        return None
    return of.Refusal("DTYPE", f"needs bf16, got {env.compute_dtype}")


BY_ENV = of.Fusion(
    "half-linear-scale",
    "forward",
    (of.BasicLinear, of.ConstantScale),
    HalfLinearScale,
    refuses=_refuses,
)


def _float(model: of.Sequential) -> None:
    model.float()


def _data(model: of.Sequential) -> None:
    model[0].weight.data = model[0].weight.data.float()


def _parameter(model: of.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().float())


@pytest.mark.parametrize("func", [fuse_by_weight, BY_ENV], ids=["te.ops style", "Fusion"])
@pytest.mark.parametrize("cast", [_float, _data, _parameter])
def test_hazard_04_a_fusion_planned_for_bf16_does_not_outlive_the_cast(
    func: Callable[..., Any], cast: Callable[[of.Sequential], None]
) -> None:
    HalfLinearScale.calls = 0
    linear = fill(of.BasicLinear(64, 8, dtype=torch.bfloat16, device="cpu"))
    model = of.Sequential(linear, of.ConstantScale(0.5))
    x = rand(5, 64, dtype=torch.bfloat16)
    with of.register_forward_fusion(func, prepend=True):
        model(x)
        assert HalfLinearScale.calls == 1, "the fusion must apply in bf16 for the test to mean much"
        cast(model)
        formula = lambda p, x: 0.5 * F.linear(x, p["0.weight"])  # noqa: E731
        against(model, formula, rand(5, 64, dtype=torch.float32, grad=True))
        assert HalfLinearScale.calls == 1, "the plan for bf16 was used in fp32"
        model.bfloat16()
        model(x)
        assert HalfLinearScale.calls == 2, "the plan for bf16 still stands beside that for fp32"


def test_hazard_04_autocast_is_part_of_the_plan() -> None:
    HalfLinearScale.calls = 0
    model = fill(of.Sequential(of.BasicLinear(64, 8, device="cpu"), of.ConstantScale(0.5)))
    x = torch.randn(5, 64)
    exact = F.linear(x.double(), model[0].weight.double()) * 0.5
    with of.register_forward_fusion(BY_ENV, prepend=True):
        close(model(x), exact, 1e-5)
        assert HalfLinearScale.calls == 0
        with torch.autocast("cpu", torch.bfloat16):
            close(model(x), exact, 0.3)
        assert HalfLinearScale.calls == 1
        close(model(x), exact, 1e-5)
        assert HalfLinearScale.calls == 1


def _loud(cls: Any) -> Any:
    """A user's subclass with its own maths in both passes: its output times 7."""

    class Loud(cls):  # type: ignore[misc]
        def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
            y, extra = super().fuser_forward(ctxs, input_, **kwargs)
            return y * 7, extra

        def fuser_backward(self, ctxs: Any, grad_output: Tensor, **kwargs: Any) -> Any:
            return super().fuser_backward(ctxs, grad_output * 7, **kwargs)

    class LoudOp(cls):  # type: ignore[misc]
        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            return super().op_forward(ctx, input_, **kwargs) * 7

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return super().op_backward(ctx, grad_output * 7)

    own = Loud if cls in (of.AddExtraInput, of.MakeExtraOutput) else LoudOp
    own.__name__ = f"Loud{cls.__name__}"
    return own


FORWARD = ("BasicLinear", "Bias", "GELU", "ConstantScale", "AddExtraInput")
BACKWARD = ("MakeExtraOutput", "RMSNorm", "BasicLinear")
ARGUMENTS: dict[str, Callable[..., tuple[Any, dict[str, Any]]]] = {
    "BasicLinear": lambda **kw: ((8, 8), kw),
    "Bias": lambda **kw: ((8,), kw),
    "RMSNorm": lambda **kw: ((8,), kw),
    "ConstantScale": lambda **kw: ((0.5,), {}),
}


def forward_formula(k: Callable[[str], float], p: dict[str, Tensor], x: Tensor, h: Tensor) -> Any:
    a = (F.linear(x, p["0.weight"]) * k("BasicLinear") + p["1.bias"]) * k("Bias")
    a = F.gelu(a, approximate="tanh") * k("GELU")
    a = F.linear(a, p["3.weight"]) * k("BasicLinear")
    return (a * 0.5 * k("ConstantScale") + h) * k("AddExtraInput")


def backward_formula(k: Callable[[str], float], p: dict[str, Tensor], x: Tensor) -> Any:
    h = F.rms_norm(x * k("MakeExtraOutput"), (8,), p["1.weight"], 1e-5) * k("RMSNorm")
    return F.linear(h * k("MakeExtraOutput"), p["3.weight"]) * k("BasicLinear"), x * 1, h


# Fusions exist for low precision too, which their patterns may require.
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("pass_", "loud"),
    [("forward", name) for name in FORWARD] + [("backward", name) for name in BACKWARD],
)
def test_hazard_05_a_subclass_is_not_fused_away(pass_: str, loud: str, dtype: torch.dtype) -> None:
    names, formula, extras = {
        "forward": ([*FORWARD[:3], "BasicLinear", *FORWARD[3:]], forward_formula, 1),
        "backward": ([*BACKWARD[:2], "MakeExtraOutput", "BasicLinear"], backward_formula, 0),
    }[pass_]

    def make(name: str) -> nn.Module:
        cls = getattr(of, name)
        args, kwargs = ARGUMENTS.get(name, lambda **kw: ((), {}))(dtype=dtype, device="cpu")
        return (_loud(cls) if name == loud else cls)(*args, **kwargs)

    against(
        fill(of.Sequential(*map(make, names))),
        lambda p, *xs: formula(lambda name: 7.0 if name == loud else 1.0, p, *xs),
        *(rand(4, 8, dtype=dtype, grad=True) for _ in range(1 + extras)),
    )


def test_hazard_05_the_record_says_that_a_subclass_was_met() -> None:
    rule = of.Fusion(
        "never", "forward", (of.ConstantScale, of.BasicLinear), lambda *ops: of.FusedOperation(ops)
    )
    model = of.Sequential(of.ConstantScale(2.0), _loud(of.BasicLinear)(8, 8, **F64))
    with of.register_forward_fusion(rule):
        record = model.plan(rand(2, 8)).record("never")
    assert record.matches == ()
    assert record.near_miss is not None
    assert record.near_miss.stopped_by.code == "SUBCLASS"
    assert "LoudBasicLinear" in record.near_miss.stopped_by.detail

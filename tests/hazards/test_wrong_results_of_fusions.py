"""Hazards 4 and 5: a fusion that is applied where it no longer, or never, holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, fill, leaf, rand


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
    out: list[of.FusibleOperation] = []
    for op in ops:
        linear = out[-1] if out else None
        if (
            isinstance(op, of.ConstantScale)
            and isinstance(linear, of.BasicLinear)
            and linear.weight.dtype == torch.bfloat16
        ):
            out[-1] = HalfLinearScale(linear, op)
        else:
            out.append(op)
    return out


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


@pytest.mark.parametrize("func", [fuse_by_weight, BY_ENV], ids=["te.ops style", "Fusion"])
@pytest.mark.parametrize("cast", ["float", "data", "parameter"])
def test_hazard_04_fusion_planned_for_bf16_does_not_outlive_the_cast(
    func: Callable[..., Any], cast: str
) -> None:
    HalfLinearScale.calls = 0
    linear = fill(of.BasicLinear(64, 8, dtype=torch.bfloat16, device="cpu"))
    model = of.Sequential(linear, of.ConstantScale(0.5))
    x = rand(5, 64)
    with of.register_forward_fusion(func, prepend=True):
        model(x.bfloat16())
        assert HalfLinearScale.calls == 1, "the fusion must apply in bf16 for the test to mean much"
        if cast == "float":
            model.float()
        elif cast == "data":
            linear.weight.data = linear.weight.data.float()
        else:
            linear.weight = nn.Parameter(linear.weight.detach().float())
        x32 = x.float().requires_grad_()
        y = model(x32)
        y.sum().backward()
        assert HalfLinearScale.calls == 1, "the plan for bf16 was used in fp32"
        model.bfloat16()
        model(x.bfloat16())
        assert HalfLinearScale.calls == 2, "the plan for bf16 still stands beside that for fp32"
    w64 = leaf(linear.weight)
    close(y, F.linear(x.float().double(), w64) * 0.5, 1e-5)
    close(x32.grad, 0.5 * w64.sum(0).expand(5, 64), 1e-5)


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


@pytest.mark.parametrize("change", ["train", "attribute", "requires_grad"])
def test_hazard_04_whatever_a_fusion_reads_of_an_operation_is_in_the_key(change: str) -> None:
    """Once refused for what an operation was; asked again when it has changed."""
    seen: list[tuple[Any, ...]] = []

    def spy(ops: list[of.FusibleOperation], *, recipe: Any) -> list[of.FusibleOperation]:
        op = ops[0]
        seen.append((op.training, op.eps, op.weight.requires_grad))
        return ops

    op = of.RMSNorm(8, **F64)
    model, x = of.Sequential(op), rand(3, 8)
    with of.register_forward_fusion(spy):
        model(x)
        if change == "train":
            model.eval()
        elif change == "attribute":
            op.eps = 0.5
        else:
            op.weight.requires_grad_(False)
        y = model(x)
    assert len(seen) == 2
    assert seen[0] != seen[1]
    close(y, F.rms_norm(x, (8,), op.weight, op.eps))


def _times(factor: float, cls: type[of.BasicOperation]) -> type[of.BasicOperation]:
    """A user's subclass with its own maths in both passes: everything times ``factor``."""

    class Loud(cls):  # type: ignore[valid-type, misc]
        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            return super().op_forward(ctx, input_, **kwargs) * factor

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return super().op_backward(ctx, grad_output * factor)

    Loud.__name__ = f"Loud{cls.__name__}"
    return Loud


def _loud_add() -> type[of.AddExtraInput]:
    class LoudAdd(of.AddExtraInput):
        def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
            y, extra = super().fuser_forward(*args, **kwargs)
            return y * 7, extra

        def fuser_backward(self, ctxs: Any, grad_output: Tensor, **kwargs: Any) -> Any:
            return super().fuser_backward(ctxs, grad_output * 7, **kwargs)

    return LoudAdd


def _loud_make() -> type[of.MakeExtraOutput]:
    class LoudMake(of.MakeExtraOutput):
        def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
            return super().fuser_forward(ctxs, input_ * 7, **kwargs)

        def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
            dx, params, extras = super().fuser_backward(*args, **kwargs)
            return dx * 7, params, extras

    return LoudMake


CLASSES = ("BasicLinear", "Bias", "GELU", "ConstantScale", "AddExtraInput")
CLASSES_OF_NORM = ("MakeExtraOutput", "RMSNorm", "BasicLinear")
# Fusions exist for low precision too, which their patterns may require.
DTYPES = {torch.float64: 1e-12, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loud", CLASSES)
def test_hazard_05_subclass_is_not_fused_away_in_forward_patterns(
    loud: str, dtype: torch.dtype
) -> None:
    def cls(name: str) -> Any:
        if name != loud:
            return getattr(of, name)
        return _loud_add() if name == "AddExtraInput" else _times(7.0, getattr(of, name))

    kw = {"dtype": dtype, "device": "cpu"}
    linear, bias = fill(cls("BasicLinear")(8, 8, **kw)), fill(cls("Bias")(8, **kw))
    last = fill(cls("BasicLinear")(8, 8, **kw))
    model = of.Sequential(
        linear, bias, cls("GELU")(), last, cls("ConstantScale")(0.5), cls("AddExtraInput")()
    )
    x, h = rand(4, 8).to(dtype).requires_grad_(), rand(4, 8).to(dtype).requires_grad_()
    y = model(x, h)
    dy = rand(4, 8).to(dtype)
    y.backward(dy)

    k = {name: 7.0 if name == loud else 1.0 for name in CLASSES}
    x64, h64, w, b, v = map(leaf, (x, h, linear.weight, bias.bias, last.weight))
    a = (F.linear(x64, w) * k["BasicLinear"] + b) * k["Bias"]
    a = F.linear(F.gelu(a, approximate="tanh") * k["GELU"], v) * k["BasicLinear"]
    y64 = (a * 0.5 * k["ConstantScale"] + h64) * k["AddExtraInput"]
    y64.backward(dy.double())
    for got, want in [
        (y, y64),
        (x.grad, x64.grad),
        (h.grad, h64.grad),
        (linear.weight.grad, w.grad),
        (bias.bias.grad, b.grad),
        (last.weight.grad, v.grad),
    ]:
        scale = want.abs().max().item()  # type: ignore[union-attr]
        close(got / scale, want / scale, DTYPES[dtype])  # type: ignore[operator]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loud", CLASSES_OF_NORM)
def test_hazard_05_subclass_is_not_fused_away_in_backward_patterns(
    loud: str, dtype: torch.dtype
) -> None:
    def cls(name: str) -> Any:
        if name != loud:
            return getattr(of, name)
        return _loud_make() if name == "MakeExtraOutput" else _times(7.0, getattr(of, name))

    kw = {"dtype": dtype, "device": "cpu"}
    norm, linear = fill(cls("RMSNorm")(8, **kw)), fill(cls("BasicLinear")(8, 8, **kw))
    model = of.Sequential(cls("MakeExtraOutput")(), norm, cls("MakeExtraOutput")(), linear)
    x = rand(4, 8).to(dtype).requires_grad_()
    grads = [rand(4, 8).to(dtype) for _ in range(3)]
    torch.autograd.backward(list(model(x)), grads)

    k = {name: 7.0 if name == loud else 1.0 for name in CLASSES_OF_NORM}
    x64, g, w = map(leaf, (x, norm.weight, linear.weight))
    first = x64 * k["MakeExtraOutput"]
    second = F.rms_norm(first, (8,), g, 1e-5) * k["RMSNorm"] * k["MakeExtraOutput"]
    y = F.linear(second, w) * k["BasicLinear"]
    torch.autograd.backward([y, first, second], [g_.double() for g_ in grads])
    for got, want in [(x.grad, x64.grad), (norm.weight.grad, g.grad), (linear.weight.grad, w.grad)]:
        scale = want.abs().max().item()  # type: ignore[union-attr]
        close(got / scale, want / scale, DTYPES[dtype])  # type: ignore[operator]


def test_hazard_05_the_record_says_that_a_subclass_was_met() -> None:
    loud = _times(7.0, of.BasicLinear)
    rule = of.Fusion(
        "never", "forward", (of.ConstantScale, of.BasicLinear), lambda *ops: of.FusedOperation(ops)
    )
    model = of.Sequential(of.ConstantScale(2.0), loud(8, 8, **F64))
    with of.register_forward_fusion(rule):
        record = model.plan(rand(2, 8)).record("never")
    assert record.matches == ()
    assert record.near_miss is not None
    assert record.near_miss.stopped_by.code == "SUBCLASS"
    assert "LoudBasicLinear" in record.near_miss.stopped_by.detail

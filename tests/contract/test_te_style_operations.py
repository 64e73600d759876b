"""Operations written for te.ops, run with only the import changed."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opfuser as te_ops
from opfuser import BasicOperation, OperationContext
from tests.hazards.tensors import F64, close, fill, leaf, rand


class LearnableScale(BasicOperation):
    """As the users' guide of te.ops writes one: quantizers positional, flags on the context."""

    def __init__(self, size: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        scale = torch.empty(size, device=device, dtype=dtype)
        self.scale: torch.nn.Parameter
        self.register_parameter("scale", torch.nn.Parameter(scale))
        self.first_calls = 0
        self.calls: list[bool] = []
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.scale)

    def pre_first_fuser_forward(self) -> None:
        super().pre_first_fuser_forward()
        self.first_calls += 1

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        super().pre_fuser_forward(requires_grad=requires_grad)
        self.calls.append(requires_grad)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        prev_op_grad_output_quantizer: Optional[Any],  # noqa: UP045
        next_op_input_quantizer: Optional[Any],  # noqa: UP045
    ) -> torch.Tensor:
        assert prev_op_grad_output_quantizer is None
        assert next_op_input_quantizer is None
        x = input_.contiguous()
        if ctx.requires_grad:
            ctx.dtype = x.dtype
            ctx.input_requires_grad = True
            ctx.scale_requires_grad = self.scale.requires_grad
            ctx.save_for_backward(self.scale, x if ctx.scale_requires_grad else None)
        return x * self.scale

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[Optional[torch.Tensor]]]:  # noqa: UP045
        scale, x = ctx.saved_tensors
        dy = grad_output.to(ctx.dtype)
        grad_scale = None
        if ctx.scale_requires_grad:
            grad_scale = (dy * x).reshape(-1, scale.numel()).sum(0)
        return dy * scale if ctx.input_requires_grad else None, (grad_scale,)


class GatedTap(BasicOperation):
    """One extra input, one extra output; ``op_*`` refuse, as te.ops' operations of that kind do."""

    num_extra_inputs: int = 1
    num_extra_outputs: int = 1

    def op_forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{self.__class__.__name__} overrides fuser_forward")

    def op_backward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{self.__class__.__name__} overrides fuser_backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> Any:
        gate = basic_op_extra_inputs[0][0]
        power = basic_op_kwargs[0].get("power", 1)
        ctx = basic_op_ctxs[0]
        if ctx.requires_grad:
            ctx.power = power
            ctx.save_for_backward(input_, gate)
        return input_ * gate**power, [(input_ + gate,)]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor, ...]],
    ) -> Any:
        ctx = basic_op_ctxs[0]
        x, gate = ctx.saved_tensors
        extra = basic_op_grad_extra_outputs[0][0]
        dx = grad_output * gate**ctx.power
        dgate = grad_output * x * ctx.power * gate ** (ctx.power - 1)
        if extra is not None:
            dx, dgate = dx + extra, dgate + extra
        return dx, [()], [(dgate,)]


def test_operation_with_a_parameter() -> None:
    op = fill(LearnableScale(8, **F64))
    model = te_ops.Sequential(te_ops.Linear(8, 8, **F64), op, te_ops.GELU())
    fill(model[0])
    x, dy = rand(2, 3, 8, grad=True), rand(2, 3, 8)
    y = model(x)
    y.backward(dy)
    x64, w, b, s = map(leaf, (x, model[0].weight, model[0].bias, op.scale))
    want = F.gelu(F.linear(x64, w, b) * s, approximate="tanh")
    want.backward(dy)
    close(y, want)
    for got, expected in zip((x, model[0].weight, model[0].bias, op.scale), (x64, w, b, s)):
        close(got.grad, expected.grad)


def test_hooks_before_forward() -> None:
    op = LearnableScale(8, **F64)
    model = te_ops.Sequential(op, te_ops.GELU())
    x = rand(3, 8)
    model(x)
    with torch.no_grad():
        model(x)
    op.requires_grad_(False)
    model(x)
    model(x.clone().requires_grad_())
    assert op.first_calls == 1
    assert op.calls == [True, False, False, True]


def test_frozen_parameter() -> None:
    op = fill(LearnableScale(8, **F64)).requires_grad_(False)
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    te_ops.Sequential(op)(x).backward(dy)
    close(x.grad, dy * op.scale)
    assert op.scale.grad is None


def test_operation_alone_copied_and_pickled() -> None:
    op = fill(LearnableScale(8, **F64))
    x = rand(3, 8)
    want = op(x)
    close(want, x * op.scale)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert twin.scale is not op.scale
        close(twin(x), want)
        twin(x).sum().backward()
        assert op.scale.grad is None
        close(twin.scale.grad, x.sum(0))
    assert list(op.state_dict()) == ["scale"]


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("use_extra", [True, False])
def test_operation_with_extra_tensors(power: int, use_extra: bool) -> None:
    tap = GatedTap()
    model = te_ops.Sequential(te_ops.ConstantScale(0.5), tap, te_ops.SiLU())
    x, gate = rand(3, 8, grad=True), rand(3, 8, grad=True)
    dy, dextra = rand(3, 8), rand(3, 8)
    y, extra = model(x, gate, op_kwargs={tap: {"power": power}})
    x64, gate64 = leaf(x), leaf(gate)
    want = F.silu(0.5 * x64 * gate64**power)
    want_extra = 0.5 * x64 + gate64
    close(y, want)
    close(extra, want_extra)
    if use_extra:
        torch.autograd.backward([y, extra], [dy, dextra])
        torch.autograd.backward([want, want_extra], [dy, dextra])
    else:
        y.backward(dy)
        want.backward(dy)
    close(x.grad, x64.grad)
    close(gate.grad, gate64.grad)


def test_only_the_extra_output_is_used() -> None:
    model = te_ops.Sequential(GatedTap(), te_ops.SiLU())
    x, gate, dextra = rand(3, 8, grad=True), rand(3, 8, grad=True), rand(3, 8)
    _, extra = model(x, gate)
    extra.backward(dextra)
    close(x.grad, dextra)
    close(gate.grad, dextra)


def test_keywords_of_op_forward() -> None:
    class Power(BasicOperation):
        def op_forward(
            self, ctx: OperationContext, input_: Tensor, *, exponent: float = 1.0, **unused: Any
        ) -> Tensor:
            ctx.exponent = exponent
            ctx.save_for_backward(input_)
            return input_**exponent

        def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return grad_output * ctx.exponent * x ** (ctx.exponent - 1), ()

    first, last = Power(), Power()
    model = te_ops.Sequential(first, te_ops.ConstantScale(2.0), last)
    x = rand(3, 8).abs().requires_grad_()
    dy = rand(3, 8)
    for kwargs in ({first: {"exponent": 3.0}, -1: {"exponent": 2.0}}, {0: {"exponent": 3.0}}):
        y = model(x, op_kwargs=kwargs)
        x.grad = None
        y.backward(dy)
        x64 = leaf(x)
        want = (2 * x64**3.0) ** (2.0 if -1 in kwargs else 1.0)
        want.backward(dy)
        close(y, want)
        close(x.grad, x64.grad)
    close(first(x, exponent=3.0), x**3.0)


@pytest.mark.parametrize("returned", [[], [None, None, None]])
def test_wrong_number_of_parameter_gradients(returned: list[None]) -> None:
    class Careless(LearnableScale):
        def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
            return grad_output, returned

    model = te_ops.Sequential(te_ops.Identity(), Careless(8, **F64))
    y = model(rand(3, 8))
    message = f"Expected op 1 to generate 1 param grads, but got {len(returned)}"
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_parameter_gradients_may_be_any_iterable() -> None:
    class Lazy(LearnableScale):
        def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
            dx, (ds,) = super().op_backward(ctx, grad_output)
            return dx, (g for g in [ds])

    op, x, dy = Lazy(8, **F64), rand(3, 8, grad=True), rand(3, 8)
    te_ops.Sequential(op)(x).backward(dy)
    close(op.scale.grad, (x * dy).sum(0))

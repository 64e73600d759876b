"""Hazards 14 to 17: structures that other fusers refuse, freeze or ignore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, fill, leaf, rand


def test_hazard_14_a_call_outside_a_sequential_freezes_no_bindings() -> None:
    make, add = of.MakeExtraOutput(), of.AddExtraInput()
    x = rand(3, 8, grad=True)
    y, extra = make(x)
    close(extra, x)
    close(add(y, x), 2 * x)
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    model = of.Sequential(make, of.ConstantScale(3.0), add)
    y = model(x)
    y.backward(torch.ones_like(y))
    close(y, 4 * x)
    close(x.grad, torch.full((3, 8), 4.0))


def test_hazard_14_a_call_on_its_own_ignores_bindings() -> None:
    """Bound or captured, an operation called by itself takes its extra inputs from the caller."""
    make, add = of.MakeExtraOutput(), of.AddExtraInput()
    make.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    model, x = of.Sequential(make, add), rand(3, 8)
    for _ in range(2):
        close(add(x, 2 * x), 3 * x)
        y, extra = make(x)
        close(y, x)
        close(extra, x)
        close(model(x), 2 * x)


def test_hazard_15_weight_shared_by_two_operations() -> None:
    first, second = of.Linear(8, 8, **F64), of.Linear(8, 8, **F64)
    fill(first)
    fill(second)
    second.weight = first.weight
    assert second.weight is first.weight
    model = of.Sequential(first, of.GELU(), second)
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    model(x).backward(dy)
    x64, w, b, c = map(leaf, (x, first.weight, first.bias, second.bias))
    F.linear(F.gelu(F.linear(x64, w, b), approximate="tanh"), w, c).backward(dy)
    close(x.grad, x64.grad)
    close(first.weight.grad, w.grad)
    close(first.bias.grad, b.grad)
    close(second.bias.grad, c.grad)
    assert len(list(model.parameters())) == 3


@pytest.mark.parametrize("split", [False, True])
def test_hazard_15_one_operation_used_twice(split: bool) -> None:
    norm, linear = fill(of.RMSNorm(8, **F64)), fill(of.Linear(8, 8, **F64))
    between: list[nn.Module] = [nn.Identity()] if split else []
    model = of.Sequential(norm, linear, *between, of.GELU(), norm, linear)
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    y = model(x)
    y.backward(dy)
    x64, g, w, b = map(leaf, (x, norm.weight, linear.weight, linear.bias))
    a = F.linear(F.rms_norm(x64, (8,), g, 1e-5), w, b)
    a = F.linear(F.rms_norm(F.gelu(a, approximate="tanh"), (8,), g, 1e-5), w, b)
    a.backward(dy)
    close(y, a)
    close(x.grad, x64.grad)
    close(norm.weight.grad, g.grad)
    close(linear.weight.grad, w.grad)
    close(linear.bias.grad, b.grad)


def _norm_linear_bias() -> of.Sequential:
    return fill(
        of.Sequential(
            of.RMSNorm(8, **F64), of.Linear(8, 8, **F64), of.GELU(), of.BasicLinear(8, 4, **F64)
        )
    )


def _norm_linear_bias_64(model: of.Sequential, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    p = {name: leaf(value) for name, value in model.named_parameters()}
    a = F.linear(F.rms_norm(x, (8,), p["0.weight"], 1e-5), p["1.weight"], p["1.bias"])
    return F.linear(F.gelu(a, approximate="tanh"), p["3.weight"]), p


REGISTER: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward pre-hook": lambda m, f: m.register_forward_pre_hook(f),
    "forward hook": lambda m, f: m.register_forward_hook(f),
    "full backward pre-hook": lambda m, f: m.register_full_backward_pre_hook(f),
    "full backward hook": lambda m, f: m.register_full_backward_hook(f),
}


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("late", [False, True])
def test_hazard_16_module_hooks_on_inner_operations_fire(kind: str, index: int, late: bool) -> None:
    model = _norm_linear_bias()
    x, dy = rand(3, 8, grad=True), rand(3, 4)
    if late:
        model(x)
    calls: list[nn.Module] = []
    handle = REGISTER[kind](model[index], lambda module, *args: calls.append(module))
    y = model(x)
    y.backward(dy)
    assert calls == [model[index]]
    x64 = leaf(x)
    want, p64 = _norm_linear_bias_64(model, x64)
    want.backward(dy)
    close(y, want)
    close(x.grad, x64.grad)
    for name, p in model.named_parameters():
        close(p.grad, p64[name].grad)
    handle.remove()
    model(x).backward(dy)
    assert len(calls) == 1
    close(x.grad, 2 * x64.grad)


def test_hazard_16_hooks_see_and_may_replace_the_tensors_of_their_operation() -> None:
    model = _norm_linear_bias()
    x, dy = rand(3, 8, grad=True), rand(3, 4)
    seen: dict[str, Tensor] = {}

    def forward(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        seen["input"], seen["output"] = args[0].detach(), output.detach()
        return output * 2

    def backward(module: nn.Module, grad_in: tuple[Tensor], grad_out: tuple[Tensor]) -> Any:
        seen["dx"], seen["dy"] = grad_in[0].detach(), grad_out[0].detach()

    model[1].register_forward_hook(forward)
    model[1].register_full_backward_hook(backward)
    y = model(x)
    y.backward(dy)

    x64 = leaf(x)
    p = {name: leaf(value) for name, value in model.named_parameters()}
    h = F.rms_norm(x64, (8,), p["0.weight"], 1e-5)
    a = F.linear(h, p["1.weight"], p["1.bias"])
    doubled = 2 * a
    h.retain_grad()
    doubled.retain_grad()
    want = F.linear(F.gelu(doubled, approximate="tanh"), p["3.weight"])
    want.backward(dy)
    close(y, want)
    close(x.grad, x64.grad)
    close(seen["input"], h)
    close(seen["output"], a)
    close(seen["dx"], h.grad)
    close(seen["dy"], doubled.grad)


def test_hazard_16_hooks_on_parts_of_a_compound_fire() -> None:
    model = fill(of.Sequential(of.Linear(8, 8, **F64), of.GELU()))
    linear = model[0]
    calls: list[nn.Module] = []
    for part in linear.basic_ops:
        part.register_forward_hook(lambda module, *args: calls.append(module))
    x = rand(3, 8)
    y = model(x)
    assert calls == list(linear.basic_ops)
    close(y, F.gelu(F.linear(x, linear.weight, linear.bias), approximate="tanh"))


def test_hazard_16_the_record_says_that_a_hook_prevented_a_fusion() -> None:
    rule = of.Fusion(
        "linear-gelu", "forward", (of.BasicLinear, of.GELU), lambda *ops: of.FusedOperation(ops)
    )
    model = of.Sequential(of.BasicLinear(8, 8, **F64), of.GELU())
    model[1].register_forward_hook(lambda *args: None)
    with of.register_forward_fusion(rule):
        record = model.plan(rand(3, 8)).record("linear-gelu")
    assert record.status == "refused"
    ((at, refusal),) = record.refusals
    assert at == 0
    assert refusal.code == "HOOK"
    assert "GELU" in refusal.detail


class OwnKernels(of.FusedOperation):
    """Linear and scale with kernels of its own in both passes, which count their calls."""

    def __init__(self, linear: of.BasicLinear, scale: of.ConstantScale) -> None:
        super().__init__([linear, scale])
        self.forwards = self.backwards = 0

    def fuser_forward(
        self, basic_op_ctxs: list[of.OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, list[tuple[()]]]:
        self.forwards += 1
        linear, scale = self.basic_ops
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, linear.weight)
        return F.linear(input_, scale.scale * linear.weight), [(), ()]

    def fuser_backward(
        self, basic_op_ctxs: list[of.OperationContext], grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor, list[Any], list[tuple[()]]]:
        self.backwards += 1
        x, w = basic_op_ctxs[0].saved_tensors
        dy = grad_output * self.basic_ops[1].scale
        return dy @ w, [(dy.t() @ x,), ()], [(), ()]


class ForwardOnly(OwnKernels):
    fuser_backward = of.FusedOperation.fuser_backward


class BackwardOnly(OwnKernels):
    fuser_forward = of.FusedOperation.fuser_forward


@pytest.mark.parametrize(
    ("cls", "counts"), [(OwnKernels, (1, 1)), (ForwardOnly, (1, 0)), (BackwardOnly, (0, 1))]
)
@pytest.mark.parametrize("alone", [False, True])
def test_hazard_17_a_fused_operation_placed_by_the_user_runs_its_own_kernels(
    cls: type[OwnKernels], counts: tuple[int, int], alone: bool
) -> None:
    fused = fill(cls(of.BasicLinear(8, 4, **F64), of.ConstantScale(0.5)))
    model = fused if alone else of.Sequential(of.GELU(), fused, of.Bias(4, **F64))
    x, dy = rand(3, 8, grad=True), rand(3, 4)
    y = model(x)
    y.backward(dy)
    assert (fused.forwards, fused.backwards) == counts
    weight = fused.basic_ops[0].weight
    x64, w = leaf(x), leaf(weight)
    want = 0.5 * F.linear(x64 if alone else F.gelu(x64, approximate="tanh"), w)
    want.backward(dy)
    close(y, want)
    close(x.grad, x64.grad)
    close(weight.grad, w.grad)


def test_hazard_17_a_fused_operation_of_the_library_placed_by_the_user_is_kept() -> None:
    linear, bias, add = of.BasicLinear(8, 8, **F64), of.Bias(8, **F64), of.AddExtraInput()
    fused = of.fused.ForwardLinearBiasAdd(linear=linear, bias=bias, add=add)
    model = fill(of.Sequential(fused, of.GELU()))
    x, h = rand(3, 8, grad=True), rand(3, 8)
    plan = model.plan(x, h)
    assert plan.forward[0].op is fused
    assert plan.forward[0].indices == (0, 1, 2)
    y = model(x, h)
    y.sum().backward()
    x64 = leaf(x)
    want = F.gelu(F.linear(x64, linear.weight, bias.bias) + h, approximate="tanh")
    want.sum().backward()
    close(y, want)
    close(x.grad, x64.grad)

"""Which operations run backward, what they save, and what happens without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, fill, leaf, rand


class Spy(of.BasicOperation):
    """Records what its contexts say; optionally has a parameter."""

    def __init__(self, parameter: bool = False) -> None:
        super().__init__()
        if parameter:
            self.weight = nn.Parameter(torch.full((8,), 2.0, dtype=torch.float64))
        self.forwards: list[bool] = []
        self.needs: list[tuple[bool, tuple[bool, ...]]] = []

    def op_forward(self, ctx: of.OperationContext, input_: Tensor, **unused: Any) -> Tensor:
        self.forwards.append(ctx.requires_grad)
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
        return input_ * self.weight if self._parameters else input_ * 1

    def op_backward(self, ctx: of.OperationContext, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        self.needs.append((ctx.needs.input, ctx.needs.parameters))
        if not self._parameters:
            return grad_output, ()
        return grad_output * self.weight, ((grad_output * x).sum(0),)


@pytest.mark.parametrize("input_grad", [False, True])
@pytest.mark.parametrize("trained", [None, 0, 1, 2])
def test_which_operations_need_backward(trained: int | None, input_grad: bool) -> None:
    ops = [Spy(), Spy(parameter=True), Spy(parameter=True), Spy()]
    model = of.Sequential(*ops)
    for n in (1, 2):
        ops[n].weight.requires_grad_(trained == n)
    x = rand(3, 8, grad=input_grad)
    y = model(x)
    first = 0 if input_grad else trained if trained in (1, 2) else 4
    assert [op.forwards for op in ops] == [[n >= first] for n in range(4)]
    assert y.requires_grad == (first < 4)
    if first == 4:
        return
    y.backward(torch.ones_like(y))
    for n, op in enumerate(ops):
        own = (trained == n,) if n in (1, 2) else ()
        assert op.needs == ([(input_grad or n > first, own)] if n >= first else [])


def test_an_extra_input_that_requires_grad_starts_the_backward() -> None:
    before, after = Spy(), Spy()
    model = of.Sequential(before, of.AddExtraInput(), after)
    x, h = rand(3, 8), rand(3, 8, grad=True)
    model(x, h).sum().backward()
    assert (before.forwards, after.forwards) == ([False], [True])
    close(h.grad, torch.ones(3, 8))


def test_a_channel_carries_the_need_with_it() -> None:
    trained, make, add = Spy(parameter=True), of.MakeExtraOutput(), of.AddExtraInput()
    make.set_extra_output_channel(0, "a", output_to_caller=False)
    add.set_extra_input_channel(0, "a")
    x = rand(3, 8)
    of.Sequential(trained, make, of.SiLU(), add)(x).sum().backward()
    w = leaf(trained.weight)
    h = x * w
    (F.silu(h) + h).sum().backward()
    close(trained.weight.grad, w.grad)


SAVERS: dict[str, Callable[[], tuple[list[nn.Module], int]]] = {
    "Linear": lambda: ([of.Linear(8, 8, **F64)], 0),
    "GroupedLinear": lambda: ([of.GroupedLinear(1, 8, 8, **F64)], -1),
    "norms": lambda: ([of.RMSNorm(8, **F64), of.LayerNorm(8, **F64), of.L2Normalization()], 0),
    "activations": lambda: ([of.GELU(), of.QGELU(), of.ReLU(), of.SReLU(), of.SiLU()], 0),
    "gated": lambda: ([of.SwiGLU(), of.Dropout(0.5), of.Reshape((3, 4))], 0),
    "structure": lambda: ([of.ConstantScale(2.0), of.Identity(), of.Quantize()], 0),
    "fused": lambda: ([of.Linear(8, 8, **F64), of.GELU(), of.Linear(8, 8, **F64)], 0),
}


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "nothing requires grad"])
def test_without_grad_nothing_is_saved(
    kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, extras = SAVERS[kind]()
    model = of.Sequential(*ops)
    if mode == "nothing requires grad":
        model.requires_grad_(False)

    def forbidden(*args: Any) -> None:
        raise AssertionError("saved for a backward that never comes")

    monkeypatch.setattr(of.OperationContext, "save_for_backward", forbidden)
    monkeypatch.setattr(torch.autograd.Function, "apply", forbidden)
    context = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "nothing requires grad": torch.enable_grad,
    }[mode]
    x = rand(3, 8, grad=mode != "nothing requires grad")
    with context():
        y = model(x, *[torch.tensor([3])] * -extras)
    assert not y.requires_grad
    assert y.grad_fn is None
    assert y.is_inference() == (mode == "inference_mode")


def test_saving_stops_before_the_first_operation_that_needs_a_gradient() -> None:
    model = of.Sequential(of.Linear(8, 8, **F64), of.SiLU(), of.RMSNorm(8, **F64))
    model[0].requires_grad_(False)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(rand(3, 8))
    sizes = sorted(tuple(t.shape) for t in saved)
    assert sizes == [(3,), (3, 8), (8,)], "input, statistics and weight of the norm, nothing else"


def test_inference_between_training_steps() -> None:
    model = fill(of.Sequential(of.Linear(8, 8, **F64), of.GELU()))
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    model(x).backward(dy)
    want = x.grad
    x.grad = None
    with torch.inference_mode():
        inference = model(x)
    y = model(x)
    y.backward(dy)
    close(x.grad, want)
    close(inference.clone(), y)


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_tensors_of_the_caller_keep_their_flags(grad_enabled: bool) -> None:
    make = of.MakeExtraOutput()
    model = of.Sequential(make, of.AddExtraInput(), of.Linear(8, 8, **F64), of.Identity())
    x, h = rand(3, 8), rand(3, 8)
    with torch.set_grad_enabled(grad_enabled):
        y, extra = model(x, h)
    assert not x.requires_grad
    assert not h.requires_grad
    assert not extra.requires_grad, "it comes before the first operation with a gradient"
    assert y.requires_grad == grad_enabled
    assert model[2].weight.requires_grad


def test_identity_of_a_leaf_does_not_turn_the_leaf_into_a_result() -> None:
    x = rand(3, 8, grad=True)
    y = of.Sequential(of.Identity(), of.MakeExtraOutput())(x)[0]
    assert x.is_leaf
    assert not y.is_leaf
    (2 * y).sum().backward()
    close(x.grad, torch.full((3, 8), 2.0))


def test_a_user_operation_that_passes_no_gradient_back() -> None:
    class Stop(of.BasicOperation):
        def op_forward(self, ctx: of.OperationContext, input_: Tensor, **unused: Any) -> Tensor:
            return input_ * 1

        def op_backward(self, ctx: of.OperationContext, grad_output: Tensor) -> Any:
            return None, ()

    linear = of.Linear(8, 8, **F64)
    for between in ([], [nn.Identity()], [nn.Tanh()]):
        model = of.Sequential(linear, *between, Stop())
        x = rand(3, 8, grad=True)
        model(x).sum().backward()
        for t in (x, linear.weight, linear.bias):
            assert t.grad is None or not t.grad.any()

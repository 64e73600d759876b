"""``accumulate_into_main_grad``: Megatron-LM's convention for gradients of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import opfuser as of
from tests.contract.tensors import F64, close, fill, leaf, rand

Makers = list[Callable[[], nn.Module]]

# What surrounds the linear decides which backward kernel makes its weight gradient.
SURROUNDINGS: dict[
    str, tuple[list[Callable[[], nn.Module]], list[Callable[[], nn.Module]], float]
] = {
    "alone": ([], [], 1.0),
    "scaled": ([], [lambda: of.ConstantScale(0.5)], 0.5),
    "tapped": ([of.MakeExtraOutput], [], 1.0),
    "biased": ([], [lambda: of.Bias(4, **F64), of.Identity], 1.0),
}


def setup(weight: nn.Parameter, dtype: torch.dtype = torch.float64, start: float = 3.0) -> Tensor:
    weight.main_grad = torch.full(weight.shape, start, dtype=dtype)
    weight.grad_added_to_main_grad = False
    return weight.main_grad


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("overwrite", [None, False, True])
@pytest.mark.parametrize("cls", ["BasicLinear", "Linear"])
def test_added_or_written(cls: str, overwrite: bool | None, around: str) -> None:
    before, after, factor = SURROUNDINGS[around]
    linear = fill(getattr(of, cls)(6, 4, accumulate_into_main_grad=True, **F64))
    weight = linear.weight
    buffer = setup(weight)
    if overwrite is not None:
        weight.overwrite_main_grad = overwrite
    model = of.Sequential(*(f() for f in before), linear, *(f() for f in after))
    x, dy = rand(2, 5, 6, grad=True), rand(2, 5, 4)
    y = model(x)
    (y[0] if isinstance(y, tuple) else y).backward(dy)
    dw = factor * dy.reshape(10, 4).t() @ x.detach().reshape(10, 6)
    assert weight.main_grad is buffer
    close(buffer, dw if overwrite else dw + 3.0)
    assert weight.grad_added_to_main_grad is True
    close(x.grad, factor * dy @ weight)
    assert weight.grad is None or weight.grad.untyped_storage() is not buffer.untyped_storage()


@pytest.mark.parametrize("around", ["alone", "scaled", "tapped"])
def test_buffer_is_wider_than_the_weight(around: str) -> None:
    """Many small contributions that bf16 would lose."""
    before, after, factor = SURROUNDINGS[around]
    kw = {"dtype": torch.bfloat16, "device": "cpu"}
    linear = of.BasicLinear(8, 8, accumulate_into_main_grad=True, **kw)
    buffer = setup(linear.weight, torch.float32, 256.0)
    model = of.Sequential(*(f() for f in before), linear, *(f() for f in after))
    x, dy = torch.full((1, 8), 0.5, dtype=torch.bfloat16), torch.ones(1, 8, dtype=torch.bfloat16)
    for _ in range(10):
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).backward(dy)
    close(buffer, torch.full((8, 8), 256.0 + 10 * 0.5 * factor), 1e-7)
    assert linear.weight.grad is None or linear.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("around", ["alone", "scaled"])
def test_what_is_written_over_is_not_read(
    around: str, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    _, after, factor = SURROUNDINGS[around]
    linear = of.BasicLinear(6, 4, accumulate_into_main_grad=True).to(device, dtype)
    linear.weight.main_grad = torch.full((4, 6), float("nan"), device=device)
    linear.weight.overwrite_main_grad = True
    x, dy = (rand(rows, n, dtype=dtype).to(device) for n in (6, 4))
    of.Sequential(linear, *(f() for f in after))(x).backward(dy)
    close(linear.weight.main_grad, factor * dy.double().t() @ x.double(), 1e-5)


def test_placeholder_and_hooks() -> None:
    linear = of.Linear(6, 4, accumulate_into_main_grad=True, **F64)
    setup(linear.weight)
    seen: list[str] = []
    linear.weight.register_hook(lambda g: seen.append("hook"))
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    of.Sequential(linear)(rand(5, 6)).sum().backward()
    assert seen == ["hook", "accumulated"]
    close(linear.bias.grad, torch.full((4,), 5.0))


def test_shared_and_repeated_weights_add_up() -> None:
    linear = fill(of.BasicLinear(6, 6, accumulate_into_main_grad=True, **F64))
    buffer = setup(linear.weight, start=0.0)
    x, dy = rand(5, 6), rand(5, 6)
    of.Sequential(linear, of.SiLU(), linear)(x).backward(dy)
    w = leaf(linear.weight)
    F.linear(F.silu(F.linear(x, w)), w).backward(dy)
    close(buffer, w.grad)


def test_frozen_weight_touches_nothing() -> None:
    linear = of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64)
    buffer = setup(linear.weight)
    linear.weight.requires_grad_(False)
    x = rand(5, 6, grad=True)
    of.Sequential(linear)(x).sum().backward()
    assert torch.equal(buffer, torch.full_like(buffer, 3.0))
    assert linear.weight.grad_added_to_main_grad is False
    assert x.grad is not None


@pytest.mark.parametrize("wrong", ["missing", "shape"])
def test_buffer_that_is_missing_or_wrong_is_an_error(wrong: str) -> None:
    linear = of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64)
    if wrong == "shape":
        linear.weight.main_grad = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="main_grad") as error:
        of.Sequential(linear)(rand(5, 6)).sum().backward()
    assert "BasicLinear" in str(error.value)


def test_zero_rows() -> None:
    linear = of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64)
    buffer = setup(linear.weight)
    of.Sequential(linear)(rand(0, 6)).sum().backward()
    assert torch.equal(buffer, torch.full_like(buffer, 3.0))
    assert linear.weight.grad_added_to_main_grad is True
    linear.weight.overwrite_main_grad = True
    of.Sequential(linear)(rand(0, 6)).sum().backward()
    assert not buffer.any()


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_grouped_linear(single: bool, overwrite: bool) -> None:
    op = of.GroupedLinear(
        2, 6, 4, accumulate_into_main_grad=True, single_grouped_weight=single, **F64
    )
    fill(op)
    weights: list[Any] = [op.weight] if single else [op.weight0, op.weight1]
    buffers = [setup(w) for w in weights]
    for w in weights:
        w.overwrite_main_grad = overwrite
    x, dy = rand(5, 6), rand(5, 4)
    of.Sequential(op)(x, torch.tensor([2, 3])).backward(dy)
    parts = [d.t() @ a for a, d in zip(x.split([2, 3]), dy.split([2, 3]))]
    wants = [torch.stack(parts)] if single else parts
    for w, buffer, dw in zip(weights, buffers, wants):
        close(buffer, dw if overwrite else dw + 3.0)
        assert w.grad_added_to_main_grad is True
    close(op.bias0.grad, dy[:2].sum(0))


class Products(TorchDispatchMode):
    """The shapes of all products of matrices that are computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.append(tuple(out.shape))
        return out


# Differentiate the sum of y, where the weight's gradient is not wanted.
WITHOUT: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "grad": lambda y, x: torch.autograd.grad(y.sum(), x)[0],
    "backward": lambda y, x: y.sum().backward(inputs=[x]) or x.grad,
}


@pytest.mark.parametrize("kind", WITHOUT)
@pytest.mark.parametrize("around", SURROUNDINGS)
def test_gradient_that_autograd_does_not_want(around: str, kind: str) -> None:
    before, after, factor = SURROUNDINGS[around]
    linear = fill(of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64))
    buffer = setup(linear.weight)
    x = rand(5, 6, grad=True)
    y = of.Sequential(*(f() for f in before), linear, *(f() for f in after))(x)
    with Products() as seen:
        dx = WITHOUT[kind](y[0] if isinstance(y, tuple) else y, x)
    close(dx, factor * linear.weight.sum(0).expand(5, 6))
    assert torch.equal(buffer, torch.full_like(buffer, 3.0))
    assert linear.weight.grad_added_to_main_grad is False
    assert linear.weight.grad is None
    assert seen.shapes == [(5, 6)]


@pytest.mark.parametrize("around", SURROUNDINGS)
def test_torch_autograd_grad_returns_the_gradient_of_the_weight(around: str) -> None:
    before, after, factor = SURROUNDINGS[around]
    linear = fill(of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64))
    buffer = setup(linear.weight)
    x, dy = rand(5, 6), rand(5, 4)
    y = of.Sequential(*(f() for f in before), linear, *(f() for f in after))(x)
    (dw,) = torch.autograd.grad(y[0] if isinstance(y, tuple) else y, linear.weight, dy)
    close(dw, factor * dy.t() @ x)
    assert torch.equal(buffer, torch.full_like(buffer, 3.0))
    assert linear.weight.grad_added_to_main_grad is False


def test_backward_into_some_weights_only() -> None:
    ops = [fill(of.BasicLinear(6, 6, accumulate_into_main_grad=True, **F64)) for _ in range(2)]
    buffers = [setup(op.weight) for op in ops]
    x = rand(5, 6, grad=True)
    y = of.Sequential(*ops)(x)
    y.sum().backward(inputs=[ops[1].weight], retain_graph=True)
    assert torch.equal(buffers[0], torch.full_like(buffers[0], 3.0))
    dw = F.linear(x.detach(), ops[0].weight.detach()).sum(0).expand(6, 6)
    close(buffers[1], 3 + dw)
    assert x.grad is None
    y.sum().backward()
    close(buffers[1], 3 + 2 * dw)
    assert (buffers[0] - 3).abs().max() > 0.1


def test_a_gradient_penalty_that_is_not_differentiated() -> None:
    """``torch.autograd.grad`` for the input, then the backward pass of the step."""
    linear = fill(of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64))
    buffer = setup(linear.weight)
    linear.weight.overwrite_main_grad = True
    x = rand(5, 6, grad=True)
    y = of.Sequential(linear)(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.sum().backward()
    close(buffer, x.detach().sum(0).expand(4, 6))


def test_hook_on_the_node_that_accumulates() -> None:
    """Megatron-LM's data parallelism waits for it; it is not one of the weight's own hooks."""
    linear = fill(of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64))
    buffer = setup(linear.weight)
    node = linear.weight.expand_as(linear.weight).grad_fn.next_functions[0][0]
    seen: list[bool] = []
    node.register_hook(lambda *_: seen.append(linear.weight.grad_added_to_main_grad))
    x = rand(5, 6, grad=True)
    y = of.Sequential(linear)(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert seen == []
    y.sum().backward()
    assert seen == [True]
    close(buffer, (3 + x.detach().sum(0)).expand(4, 6))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    linear = fill(of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64))
    buffer = setup(linear.weight)
    x = rand(5, 6, grad=True)
    for n in range(1, 3):
        checkpoint(of.Sequential(linear), x, use_reentrant=reentrant).sum().backward()
        close(buffer, (3 + n * x.detach().sum(0)).expand(4, 6))


def test_weight_that_is_frozen_between_the_passes() -> None:
    linear = fill(of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64))
    buffer = setup(linear.weight)
    y = of.Sequential(linear)(rand(5, 6))
    linear.weight.requires_grad_(False)
    y.sum().backward()
    assert torch.equal(buffer, torch.full_like(buffer, 3.0))
    assert linear.weight.grad_added_to_main_grad is False


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("delay", [False, True])
def test_groups_whose_gradient_autograd_does_not_want(
    delay: bool, single: bool, main_grad: bool
) -> None:
    op = fill(
        of.GroupedLinear(
            2, 6, 4, bias=False, accumulate_into_main_grad=main_grad, delay_wgrad_compute=delay,
            single_grouped_weight=single, **F64
        )
    )  # fmt: skip
    plain = copy.deepcopy(op)
    plain.accumulate_into_main_grad = plain.delay_wgrad_compute = False
    weights = list(op.parameters())
    buffers = [setup(w) for w in weights]
    x, sizes = rand(5, 6, grad=True), torch.tensor([2, 3])
    y = of.Sequential(op)(x, sizes).sum()
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    dws = torch.autograd.grad(y, weights, retain_graph=True)
    wants = torch.autograd.grad(plain(x, sizes).sum(), [x, *plain.parameters()])
    for got, want in zip([dx, *dws], wants):
        close(got, want)
    op.backward_dw()  # nothing waits
    assert all(torch.equal(b, torch.full_like(b, 3.0)) for b in buffers)
    assert all(w.grad is None for w in weights)
    y.backward(inputs=weights[-1:])
    if delay:
        op.backward_dw()
    if main_grad:
        close(buffers[-1], 3 + wants[-1])
    else:
        close(weights[-1].grad, wants[-1])
    if not single:
        assert torch.equal(buffers[0], torch.full_like(buffers[0], 3.0))
        assert weights[0].grad is None

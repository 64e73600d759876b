"""Masters get the whole gradient, wherever it lies: in ``grad``, in ``main_grad`` or in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from opfuser.errors import MasterWeightError, NotSupportedError
from opfuser.optim import MasterWeights

BF16, NAN = torch.bfloat16, float("nan")
ROWS, WIDTH, LR = 6, 4, 0.125
MODES = {
    "main": {"accumulate_into_main_grad": True, "accumulate_into_grad": False},
    "grad": {"accumulate_into_main_grad": False, "accumulate_into_grad": True},
    "autograd": {"accumulate_into_main_grad": False, "accumulate_into_grad": False},
}


class Tied(nn.Module):
    """One weight: of an embedding, of two heads, and of a term of the loss in plain torch."""

    def __init__(self, first: str, second: str, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = opfuser.Embedding(ROWS, WIDTH, dtype=dtype)
        self.heads = nn.ModuleList(opfuser.BasicLinear(WIDTH, ROWS, dtype=dtype) for _ in range(2))
        for head in self.heads:
            head.weight = self.embedding.weight
        self.use(first, second)

    @property
    def weight(self) -> Any:
        return self.embedding.weight

    def use(self, *modes: str) -> None:
        """Where the heads accumulate from now on."""
        for head, mode in zip(self.heads, modes):
            head.accumulate_into_main_grad = head.accumulate_into_grad = False
            for name, value in MODES[mode].items():
                setattr(head, name, value)

    def loss(self, seed: int) -> Tensor:
        index, x, dys = batch(seed)
        first, second = self.heads
        h = opfuser.Sequential(self.embedding, first)(index)
        ys = h, second(x.to(self.weight.dtype))
        return loss(ys, dys, self.weight)


def batch(seed: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    dys = torch.randn(5, ROWS), torch.randn(3, ROWS)
    return torch.randint(ROWS, (5,)), torch.randn(3, WIDTH), dys


def loss(ys: Any, dys: Any, weight: Tensor) -> Tensor:
    products = [(y * dy.to(y.dtype)).sum() for y, dy in zip(ys, dys)]
    return products[0] + products[1] + weight.square().sum()


class ByHand:
    """A master in float64, whose gradients plain torch computes at the parameter's values."""

    def __init__(self, model: Tied) -> None:
        self.model = model
        self.master = model.weight.detach().double().clone()
        self.grad = torch.zeros_like(self.master)

    def backward(self, seed: int) -> None:
        index, x, dys = batch(seed)
        w = self.model.weight.detach().double().requires_grad_()
        x = x.to(self.model.weight.dtype).double()
        ys = F.linear(F.embedding(index, w), w), F.linear(x, w)
        dys = tuple(dy.to(self.model.weight.dtype).double() for dy in dys)
        (grad,) = torch.autograd.grad(loss(ys, dys, w), w)
        self.grad += grad

    def step(self) -> None:
        self.master -= LR * self.grad

    def check(self, optimizer: MasterWeights) -> None:
        (master,) = optimizer.optimizer.param_groups[0]["params"]
        # Of gradients in bf16; what is left out or counted twice is of the order of one.
        torch.testing.assert_close(master.detach().double(), self.master, rtol=0, atol=0.03)


def train(
    optimizer: MasterWeights, hand: ByHand, steps: list[list[str]], zero: str, overwrites: bool
) -> None:
    """Steps of batches, in each of which the heads accumulate as it says."""
    model = hand.model
    for number, batches in enumerate(steps):
        for at, modes in enumerate(batches):
            model.use(*modes.split())
            model.loss(10 * number + at).backward()
            hand.backward(10 * number + at)
        grad = model.weight.grad
        optimizer.step()
        hand.step()
        hand.check(optimizer)
        assert model.weight.grad is grad
        hand.grad.zero_()
        ZERO[zero](optimizer, model)
        if not overwrites:
            model.weight.main_grad.zero_()


ZERO: dict[str, Callable[[MasterWeights, Tied], None]] = {
    "to None": lambda optimizer, model: optimizer.zero_grad(),
    "to zeros": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "of the model": lambda optimizer, model: model.zero_grad(),
}
STEPS = {
    "one head": [["main autograd"]] * 3,
    "both heads": [["main main"]] * 3,
    "beside accumulate_into_grad": [["main grad"]] * 3,
    "switched off": [["main main"], ["main main"], ["autograd autograd"], ["autograd grad"]],
    "switched on": [["autograd grad"], ["main autograd"], ["main main"]],
    "never": [["autograd grad"], ["grad grad"]],
    "several batches": [["main main", "main grad"], ["main autograd", "autograd main"]],
    "switched within a step": [["main main", "autograd grad"], ["grad autograd", "main grad"]],
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("zero", "dtype", "overwrites"),
    [
        ("to None", BF16, False),
        ("to zeros", BF16, True),
        ("of the model", BF16, True),
        ("to None", torch.float32, True),
        ("to zeros", torch.float64, False),
    ],
)
def test_steps_are_those_by_hand(
    steps: str, zero: str, dtype: torch.dtype, overwrites: bool
) -> None:
    """What overwrites ``main_grad`` is that of one backward pass, and nobody sets it to zero."""
    if overwrites and max(map(len, STEPS[steps])) > 1:
        overwrites = False
    model = Tied("autograd", "autograd", dtype)
    wide = torch.float32 if dtype == BF16 else dtype
    model.weight.main_grad = torch.full((ROWS * WIDTH,), NAN if overwrites else 0.0, dtype=wide)
    model.weight.overwrite_main_grad = overwrites
    optimizer, hand = MasterWeights(model, torch.optim.SGD, lr=LR), ByHand(model)
    train(optimizer, hand, STEPS[steps], zero, overwrites)


def tied(first: str = "main", second: str = "autograd") -> tuple[Tied, MasterWeights, ByHand]:
    model = Tied(first, second)
    model.weight.main_grad = torch.zeros(ROWS, WIDTH)
    return model, MasterWeights(model, torch.optim.SGD, lr=LR), ByHand(model)


def test_a_further_step_takes_the_same_gradient_again() -> None:
    """As in plain torch, as long as nobody has set gradients to zero."""
    model, optimizer, hand = tied()
    model.loss(1).backward()
    hand.backward(1)
    for _ in range(3):
        optimizer.step()
        hand.step()
        hand.check(optimizer)


def test_a_weight_without_a_gradient_is_left_alone() -> None:
    """Though ``main_grad``, which backward passes overwrite, still holds an earlier one."""
    model, optimizer, hand = tied()
    model.weight.overwrite_main_grad = True
    model.loss(1).backward()
    hand.backward(1)
    placeholder_and_embedding = model.weight.grad.double()
    model.weight.grad = None
    optimizer.step()
    hand.grad -= placeholder_and_embedding
    for _ in range(2):
        hand.step()
        hand.check(optimizer)
        optimizer.step()
        hand.grad.zero_()


def test_gradients_that_were_set_to_zero_before_a_step_do_not_count() -> None:
    model, optimizer, hand = tied()
    model.weight.overwrite_main_grad = True
    model.loss(1).backward()
    optimizer.zero_grad()
    optimizer.step()
    hand.check(optimizer)
    model.use("autograd", "autograd")
    model.loss(2).backward()
    hand.backward(2)
    optimizer.step()
    hand.step()
    hand.check(optimizer)


def test_a_frozen_weight() -> None:
    model, optimizer, hand = tied()
    train(optimizer, hand, [["main autograd"]], "to None", False)
    model.weight.requires_grad_(False)
    x = batch(2)[1].requires_grad_()
    model.heads[0](x.to(BF16)).sum().backward()
    optimizer.step()
    hand.check(optimizer)


def test_a_hook_that_moves_gradients_to_main_grad() -> None:
    """As Megatron-LM's data parallelism does with those that were not written there."""
    model, optimizer, hand = tied("main", "grad")
    weight = model.weight

    def move(*unused: Any) -> None:
        weight.main_grad.add_(weight.grad)
        weight.grad = None

    weight.register_post_accumulate_grad_hook(move)
    train(optimizer, hand, [["main autograd"], ["main main"]], "to None", False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 0.02), (torch.float32, 1e-5)])
def test_an_optimizer_that_evaluates_several_times(dtype: torch.dtype, tolerance: float) -> None:
    """In one step, with gradients set to zero in between, both in ``grad`` and ``main_grad``."""
    head = opfuser.BasicLinear(4, 4, dtype=dtype, accumulate_into_main_grad=True)
    weight: Any = head.weight
    weight.main_grad = torch.zeros(4, 4)
    plain = nn.Parameter(weight.detach().float().clone())
    optimizer = MasterWeights(head, torch.optim.LBFGS, lr=0.5, max_iter=6)
    other = torch.optim.LBFGS([plain], lr=0.5, max_iter=6)

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        weight.main_grad.zero_()
        y = head(torch.eye(4, dtype=dtype))
        value = (y.float() - 1).square().sum() + weight.float().square().sum()
        value.backward()
        return value

    def expected() -> Tensor:
        other.zero_grad()
        value = (plain.t() - 1).square().sum() + plain.square().sum()
        value.backward()
        return value

    optimizer.step(closure)
    other.step(expected)
    torch.testing.assert_close(weight.float(), plain, rtol=0, atol=tolerance)


class _Foreign(torch.autograd.Function):
    """Adds to ``main_grad`` as modules of Transformer Engine do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        weight = ctx.weight
        weight.main_grad.add_(dy.t() @ ctx.x)
        weight.grad_added_to_main_grad = True
        zeros = getattr(weight, "zero_out_wgrad", False)
        return None, torch.full_like(weight, 0.0 if zeros else NAN)


@pytest.mark.parametrize("zeros", [False, True])
def test_placeholders_that_were_never_written(zeros: bool) -> None:
    """They are no gradient; ``zero_out_wgrad`` says that there are none of these."""
    weight: Any = nn.Parameter(torch.randn(3, 4).to(BF16))
    weight.main_grad = torch.zeros(3, 4)
    optimizer = MasterWeights(nn.Identity(), torch.optim.SGD, [weight], lr=LR)
    (master,) = optimizer.optimizer.param_groups[0]["params"]
    want = master.detach().clone()
    x, dy = torch.randn(5, 4).to(BF16), torch.randn(5, 3).to(BF16)
    if zeros:
        weight.zero_out_wgrad = True
        (_Foreign.apply(x, weight).mul(dy).sum() + weight.sum()).backward()
    else:
        _Foreign.apply(x, weight).backward(dy)
    optimizer.step()
    want -= LR * (dy.t().float() @ x.float() + zeros)
    torch.testing.assert_close(master.detach(), want, rtol=0, atol=0.02)


def test_a_main_grad_that_is_gone() -> None:
    model, optimizer, _ = tied()
    model.loss(1).backward()
    model.weight.main_grad = None
    with pytest.raises(MasterWeightError) as error:
        optimizer.step()
    assert str(error.value) == (
        "A parameter with grad_added_to_main_grad has its gradient in main_grad (MasterWeights). "
        "Received: main_grad: None; embedding.weight of shape (6, 4). Keep main_grad until the "
        "step, or set grad_added_to_main_grad to False."
    )


def test_a_gradient_scaler_is_refused() -> None:
    model, optimizer, hand = tied()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model.loss(1)).backward()
    with pytest.raises(NotSupportedError, match=r"unscales .* grad alone .*gradients in main_grad"):
        scaler.step(optimizer)
    hand.check(optimizer)
    optimizer.zero_grad()
    model.use("autograd", "autograd")
    scaler.update()
    scaler.scale(model.loss(2)).backward()
    hand.backward(2)
    scaler.step(optimizer)
    hand.step()
    hand.check(optimizer)

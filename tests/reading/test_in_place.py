"""Writes in place are read as what they compute where nothing else sees the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.reading.kept import KeptError

from .families import stream
from .recomputed import Example, assert_recomputed, read_of
from .tiny import WIDTH, randomized


class Layers(nn.Module):
    """Two linear layers, and what a function computes with them."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.gamma = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


class Kept(nn.Module):
    """A child that holds what it has returned."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sin()
        return self.last


class Halved(nn.Module):
    """A child that writes to its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def example(function: Callable[..., Tensor], **children: nn.Module) -> Example:
    torch.manual_seed(0)
    module = Layers(function)
    for name, child in children.items():
        module.add_module(name, child)
    return Example(randomized(module), (stream().requires_grad_(),))


def summed(self: Layers, x: Tensor) -> Tensor:
    y = self.a(x)
    y += self.b(x)
    return x + y


def residual(self: Layers, x: Tensor) -> Tensor:
    h = self.b(self.norm(x))
    h *= self.gamma
    h += x
    return self.a(h)


def many(self: Layers, x: Tensor) -> Tensor:
    y = self.a(x)
    y.add_(self.b(x)).mul_(2.0).add_(self.norm(x)).div_(4.0)
    return y.add_(x)


def of_a_view(self: Layers, x: Tensor) -> Tensor:
    y = self.a(x).view(-1, WIDTH)
    y += self.b(x).view(-1, WIDTH)
    return x + y.view(x.shape)


def parts(*ends: int, first: int = 0, step: int = 1, like: Any = None) -> Callable[..., Tensor]:
    """Columns of a tensor without entries, to which those of two layers are copied in turn.

    Args:
        ends: where the columns of each end, of which the next ones begin there.
        first: where the last ones begin.
        step: between columns.
        like: makes something else of what is copied.
    """

    def function(self: Layers, x: Tensor) -> Tensor:
        y, start = x.new_empty(*x.shape[:-1], WIDTH), 0
        for n, end in enumerate(ends):
            source = (self.b(x) if n % 2 else self.a(x))[..., start:end:step]
            y[..., start:end:step].copy_(source if like is None else like(source))
            start = end if n + 2 < len(ends) else end + first
        return x + y

    return function


def after_the_next(self: Layers, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., 5:].copy_(self.a(x)[..., 5:])
    y[..., :5].copy_(self.b(x)[..., :5])
    return x + y


def twice(self: Layers, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., :5].copy_(self.a(x)[..., :5])
    y[..., :5].copy_(self.b(x)[..., :5])
    y[..., 5:].copy_(self.a(x)[..., 5:])
    return x + y


def filled(self: Layers, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., :5].copy_(self.a(x)[..., :5])
    y[..., 5:].copy_(self.b(x)[..., 5:])
    return y


def seen_behind(self: Layers, x: Tensor) -> Tensor:
    y = filled(self, x)
    return x + torch.cat([y.mT.mT[..., :9], y[..., 9:]], -1)


def written_behind(self: Layers, x: Tensor) -> Tensor:
    y = filled(self, x)
    y[..., :9].mul_(2.0)
    return x + y


READ: dict[str, Callable[..., Tensor]] = {
    "sum": summed,
    "residual": residual,
    "many": many,
    "view": of_a_view,
    "add_ of a layer's": lambda self, x: self.a(x).add_(x),
    "bias": lambda self, x: x + self.a(self.norm(x)).add_(self.gamma),
    "ReLU": lambda self, x: self.b(F.relu(self.a(x), inplace=True)),
    "SiLU": lambda self, x: self.b(F.silu(self.a(x), inplace=True)),
    "parts": parts(5, WIDTH),
    "views of parts, side by side": seen_behind,
    "parts that are written to through a view": lambda self, x: (
        x + filled(self, x).view(-1, WIDTH).mul_(2.0).view(x.shape)
    ),
    "many parts": parts(3, 9, 20, WIDTH),
    "a part after the next": after_the_next,
    "a part twice": twice,
    "dropout": lambda self, x: x + F.dropout(self.a(x), 0.0, True, True),
}


def seen_by_a_view(self: Layers, x: Tensor) -> Tensor:
    y = self.a(x)
    view = y.view(-1, WIDTH)
    y += self.b(x)
    return view.view(x.shape) + x


def part_of_what_is_read(self: Layers, x: Tensor) -> Tensor:
    y = self.a(x)
    y[..., :4].add_(1)
    return y + x


def under_detach(self: Layers, x: Tensor) -> Tensor:
    y = self.a(x)
    y.detach().add_(1)
    return y


def of_the_input(self: Layers, x: Tensor) -> Tensor:
    return self.b(x.view(-1, WIDTH).add_(self.gamma)).view(x.shape)


def of_a_parameter(self: Layers, x: Tensor) -> Tensor:
    self.gamma.data.mul_(0.5)
    return x * self.gamma


def wider(self: Layers, x: Tensor) -> Tensor:
    y = self.a(x).float()
    y += self.b(x)
    return y.double()


def of_itself(self: Layers, x: Tensor) -> Tensor:
    y = self.a(x)
    y += y[:1]
    return y


def without_gradients(self: Layers, x: Tensor) -> Tensor:
    y = self.a(x)
    with torch.no_grad():
        y += 1
    return y


def seen_in_between(self: Layers, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., :5].copy_(self.a(x)[..., :5])
    z = y[..., :5] * 2
    y[..., 5:].copy_(self.a(x)[..., 5:])
    return x + torch.cat([z, y[..., 5:]], -1)


def with_a_view(self: Layers, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    view = y[..., :5]
    view.copy_(self.a(x)[..., :5])
    y[..., 5:].copy_(self.a(x)[..., 5:])
    return x + torch.cat([view * 2, y[..., 5:]], -1)


def of_its_own_part(self: Layers, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., :16].copy_(self.a(x)[..., :16])
    y[..., 16:].copy_(y[..., :16])
    return x + y


_EMPTY = "computes (new_empty|empty_like)|writes in place"
KEPT: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a view sees it": (seen_by_a_view, "writes in place by add_"),
    "a part": (lambda self, x: (y := self.a(x)).__setitem__(0, 1) or y, "by __setitem__"),
    "a part of what is read": (part_of_what_is_read, "writes in place by add_"),
    "detached": (under_detach, "writes in place by add_"),
    "the input": (of_the_input, "writes in place by add_"),
    "a parameter": (of_a_parameter, "writes in place by mul_"),
    "rounded": (wider, "rounds to float32|writes in place"),
    "itself": (of_itself, "writes in place by add_"),
    "without gradients": (without_gradients, "with gradients switched"),
    "parts that leave columns out": (parts(5, WIDTH, first=1), _EMPTY),
    "parts that overlap": (parts(5, WIDTH, first=-1), _EMPTY),
    "every other column of a part": (parts(5, WIDTH, step=2), _EMPTY),
    "a part that is broadcast": (parts(5, WIDTH, like=lambda y: y[:1]), _EMPTY),
    "a part that is rounded": (parts(5, WIDTH, like=lambda y: y.float()), _EMPTY),
    "parts that are seen in between": (seen_in_between, _EMPTY),
    "a view of parts": (with_a_view, _EMPTY),
    "a part of itself": (of_its_own_part, _EMPTY),
    "parts that are written to behind": (written_behind, "writes in place by mul_"),
    "another function": (lambda self, x: self.a(x).exp_(), "writes in place by exp_"),
    "alpha": (lambda self, x: self.a(x).add_(x, alpha=2), "computes add"),
}


@pytest.mark.parametrize("name", READ)
def test_a_write_is_read(name: str) -> None:
    assert_recomputed(example(READ[name]))


@pytest.mark.parametrize("name", KEPT)
def test_a_write_that_may_be_seen_is_kept(name: str) -> None:
    function, reason = KEPT[name]
    with pytest.raises(KeptError, match=reason):
        read_of(example(function))


def test_what_a_child_holds_is_not_written_to_elsewhere() -> None:
    holds: dict[str, Any] = {"held": Kept()}
    with pytest.raises(KeptError, match="writes"):
        read_of(example(lambda self, x: x + self.held(x).mul_(2.0), **holds))


def test_what_hooks_have_seen_is_not_written_to_elsewhere() -> None:
    found = example(lambda self, x: self.a(x).mul_(2.0))
    found.module.a.register_forward_hook(lambda module, args, out: None)
    with pytest.raises(KeptError, match="writes in place by mul_"):
        read_of(found)


def test_a_child_that_writes_to_its_argument_is_not_called() -> None:
    found = example(lambda self, x: x + self.halved(self.a(x)), halved=Halved())
    assert_recomputed(found)
    with pytest.raises(KeptError, match="computes sin"):
        read_of(example(lambda self, x: self.halved(self.a(x)).sin(), halved=Halved()))

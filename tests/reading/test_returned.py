"""Modules that return several tensors: what children have returned, and inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.reading.construction import build
from opfuser.reading.kept import KeptError

from .families import stream
from .recomputed import Example, assert_recomputed, called_in, read_of
from .tiny import WIDTH, randomised


class Odd(nn.Module):
    """Attention that nothing explains, and what it was made of besides its output."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(9, 1)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, bias: Tensor | None = None, flags: Any = ()
    ) -> tuple[Tensor, Tensor, None, Tensor]:
        if bias is None:
            length = x.shape[1]
            bias = self.table.weight[:length] @ self.table.weight[:length].T
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT).sin() + bias
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return self.out(weights @ v), bias, None, weights


class Layer(nn.Module):
    """A layer around it, which returns all or some of that."""

    def __init__(self, kind: type[nn.Module] = Odd) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = kind()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Any = None) -> Any:
        y, bias, nothing, weights = self.attention(
            self.norm_1(x), mask, bias=bias, flags=(True, None)
        )
        x = x + y
        return x + self.down(F.gelu(self.up(self.norm_2(x)))), bias, [nothing, weights], 3


def _example(*others: Tensor | None, module: nn.Module | None = None) -> Example:
    module = randomised(module or Layer())
    return Example(module, (stream(2, 7, WIDTH).requires_grad_(), *others))


def test_tensors_that_a_child_returned_are_handed_on_with_gradients() -> None:
    reading = assert_recomputed(_example(), whole=False)
    assert reading.outputs == 3
    assert called_in(reading) == ["attention"]


def test_inputs_are_passed_to_a_child_and_returned() -> None:
    mask, bias = stream(2, 7, 7).requires_grad_(), stream(7, 7).requires_grad_()
    reading = assert_recomputed(_example(mask, bias), whole=False)
    assert reading.outputs == 2  # the bias is an input
    assert called_in(reading) == ["attention"]


class Explained(nn.Module):
    """A feed-forward network that hands out what is in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        between = F.gelu(self.up(x))
        return self.down(between), between.mean(1), None, between


def test_a_child_that_is_explained_is_called_for_what_else_it_returns() -> None:
    reading = assert_recomputed(_example(module=Layer(Explained)), whole=False)
    assert reading.outputs == 3
    assert called_in(reading) == ["attention"]


class Twice(nn.Module):
    """Reads another tensor that a child returned, which the reader does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Odd()

    def forward(self, x: Tensor) -> Any:
        y, bias, _, weights = self.attention(x)
        return x + y, bias * 2, weights


@pytest.mark.parametrize("kind", [Twice])
def test_what_is_computed_of_another_result_is_no_output(kind: type[nn.Module]) -> None:
    with pytest.raises(KeptError, match="returns 3 tensors, the last of") as kept:
        read_of(_example(module=kind()))
    assert "in 'attention'" in kept.value.reason


class Several(nn.Module):
    """Gives a child what the reader cannot give it."""

    def __init__(self, argument: Any) -> None:
        super().__init__()
        self.attention, self.argument = Odd(), argument

    def forward(self, x: Tensor) -> Any:
        return x + self.attention(x.relu(), flags=self.argument(x))[0]


@pytest.mark.parametrize(
    "argument",
    [
        pytest.param(lambda x: [x], id="list"),
        pytest.param(lambda x: x.shape[1], id="size"),
        pytest.param(lambda x: x.exp(), id="two streams"),
        pytest.param(lambda x: object(), id="object"),
    ],
)
def test_children_with_other_arguments_are_not_called(argument: Any) -> None:
    with pytest.raises(KeptError):
        read_of(_example(module=Several(argument)))


def test_calls_of_one_sequence_do_not_mix() -> None:
    """A child may call the module around it again, as recomputation does."""
    example = _example()
    built = build(read_of(example), example.module)
    x, again = example.inputs()[0], []

    def once_more(*_: Any) -> None:
        if not again:
            again.append(None)
            again[0] = built([x.flip(1)])

    built.sequence.register_forward_hook(once_more)
    y, bias, weights = built([x])
    want = example.module(x)
    for got, expected in zip((y, bias, weights), (want[0], want[1], want[2][1])):
        assert torch.allclose(got, expected)
    assert not torch.allclose(again[0][2], weights)

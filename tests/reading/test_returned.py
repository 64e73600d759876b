"""Modules that return several tensors: what children have returned, and inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.reading.construction import build
from opfuser.reading.kept import KeptError
from opfuser.reading.operations import HeadNorm

from .families import stream
from .recomputed import Example, assert_recomputed, called_in, operation_in, read_of
from .tiny import WIDTH, randomized


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
    module = randomized(module or Layer())
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


class Handed(nn.Module):
    """Hands out all that a child returned, too, as the projection of features in Wav2Vec2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.up(y), y


def test_the_only_result_of_a_child_is_an_output_too() -> None:
    reading = assert_recomputed(_example(module=Handed()), whole=False)
    assert (reading.outputs, called_in(reading)) == (2, ["norm"])


class Twice(nn.Module):
    """Reads another tensor that a child returned, which the reader does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Odd()

    def forward(self, x: Tensor) -> Any:
        y, bias, _, weights = self.attention(x)
        return x + y, bias, weights * 2


def test_what_is_computed_of_another_result_is_no_output() -> None:
    with pytest.raises(KeptError, match="returns 3 tensors, one made by mul"):
        read_of(_example(module=Twice()))


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


class Weighing(nn.Module):
    """A layer whose attention returns its weights."""

    def __init__(self, kv_heads: int = 4, p: float = 0.0, how: str = "") -> None:
        super().__init__()
        self.norm, self.how, self.p = nn.LayerNorm(WIDTH), how, p
        self.kv_heads = kv_heads
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH + 16 * kv_heads), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).split([WIDTH, 8 * self.kv_heads, 8 * self.kv_heads], -1)
        q, k, v = (y.view(b, s, -1, 8).transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(4 // self.kv_heads, 1) for y in (k, v))
        scores = q @ k.mT * 0.3
        if self.how == "capped":
            scores = 5 * torch.tanh(scores / 5)
        if mask is not None:
            scores = scores + mask
        if self.how == "scaled":
            scores = scores / 1.5
        weights = scores.softmax(-1)
        used = F.dropout(weights, self.p)
        y = (used @ v).transpose(1, 2).flatten(2)
        return self.out(y), used if self.how == "dropped" else weights

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, weights = self.attend(self.norm(x), mask)
        return x + y, weights


def _mask(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).masked_fill(torch.rand(shape) < 0.2, -1e9)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("how", ["", "capped", "scaled"])
@pytest.mark.parametrize("shape", [None, (2, 1, 7, 7), (1, 4, 1, 7), (7, 7)])
def test_weights_of_attention_are_an_output_with_gradients(
    kv_heads: int, how: str, shape: tuple[int, ...] | None
) -> None:
    module = Weighing(kv_heads, how=how)
    example = _example(None if shape is None else _mask(*shape), module=module)
    reading = assert_recomputed(example)
    assert reading.outputs == 2


def test_weights_before_dropout_are_an_output() -> None:
    assert_recomputed(_example(module=Weighing(p=1.0)))


class Around(nn.Module):
    """A residual sum around attention that returns the weights that it has dropped some of."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), Weighing(**how)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y, weights = self.inner(self.norm(x), mask)
        return F.gelu(x + y), weights


def test_weights_after_dropout_are_those_that_the_child_has_drawn() -> None:
    reading = assert_recomputed(_example(module=Around(p=0.5, how="dropped")), whole=False)
    assert called_in(reading) == ["inner"]


class Folded(nn.Module):
    """Attention whose batch and heads are one dimension, as in Bloom."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, alibi: Tensor, mask: Tensor) -> Any:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 4, 3, 8).permute(3, 0, 2, 1, 4).flatten(1, 2)
        scores = alibi.baddbmm(q, k.mT, beta=1.0, alpha=0.3).view(b, 4, s, s) + mask
        weights = scores.softmax(-1)
        y = torch.bmm(weights.view(4 * b, s, s), v)
        return self.out(y.view(b, 4, s, 8).transpose(1, 2).reshape(b, s, -1)), weights


def test_attention_with_folded_heads() -> None:
    reading = assert_recomputed(_example(_mask(8, 1, 7), _mask(2, 1, 7, 7), module=Folded()))
    assert reading.outputs == 2


class HeadNorms(Weighing):
    """LayerNorms of heads, with weights and biases of their own or without."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.q_norm, self.k_norm = (nn.LayerNorm(8, 1e-3, **how) for _ in range(2))

    def attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        weights = (self.q_norm(q) @ self.k_norm(k).mT).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("how", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_layer_norms_of_queries_and_keys(how: dict[str, bool]) -> None:
    reading = assert_recomputed(_example(module=HeadNorms(**how)))
    assert operation_in(reading, HeadNorm).centered


def test_layer_norms_of_queries_alone_are_refused() -> None:
    module = HeadNorms()
    module.k_norm = nn.RMSNorm(8)  # type: ignore[assignment]
    with pytest.raises(KeptError, match="opfuser has no operation for such norms of queries"):
        read_of(_example(module=module))

"""Attention whose cache keeps what keys and values are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.reading.construction import build
from opfuser.reading.grammar import read
from opfuser.reading.kept import KeptError
from opfuser.reading.operations import Cached, ForkedAttention, Rotary
from opfuser.reading.tracer import trace

from .families import layer_of, stream, turned
from .mutations import outcomes_of
from .recomputed import Example, assert_recomputed, operation_in, operations_in, read_of
from .tiny import BATCH, LENGTH, WIDTH, model_of, transformers

HEADS, LATENT, TURNING = 4, 10, 4
FAMILIES = ["axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]


def neighbors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbors turn, and are no neighbors behind it: a cache keeps them in this order."""
    a, b, half = x[..., ::2], x[..., 1::2], x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def as_given(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


Changed = Callable[..., tuple[Tensor, ...]]


class Latent(nn.Module):
    """Latent attention as in DeepSeek.

    Args:
        turn: what is done to the last entries of queries and to the shared ones of keys.
        still: how many entries of each head do not turn.
        values: entries of each head of values.
        before, after: what is made of the two tensors that the cache is given, and that it returns,
            with the module, the input and what turns.

    Attributes:
        seen: how many keys there are; 0 is all, or without a mask as many as queries.
        written: whether keys are written to memory in parts.
    """

    def __init__(
        self,
        turn: Callable[..., Tensor] = turned,
        still: int = 6,
        values: int = 7,
        *,
        before: Changed = lambda m, x, latent, turning, *tables: (latent, turning),
        after: Changed = lambda m, x, latent, turning, *tables: (latent, turning),
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn, self.before, self.after = turn, before, after
        self.still, self.values, self.seen, self.written = still, values, 0, False
        q_norm, up = nn.RMSNorm(12, eps=1e-5), nn.Linear(12, HEADS * (still + TURNING))
        self.q = nn.Sequential(nn.Linear(WIDTH, 12), q_norm, up)
        self.down = nn.Linear(WIDTH, LATENT + TURNING)
        self.up = nn.Linear(LATENT, HEADS * (still + values))
        self.norm, self.out = nn.RMSNorm(LATENT, eps=1e-5), nn.Linear(HEADS * values, WIDTH)
        self.double()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, HEADS, -1).transpose(1, 2)
        q, q_turning = q.split([self.still, TURNING], -1)
        latent, turning = self.down(x).split([LATENT, TURNING], -1)
        latent = self.norm(latent).view(b, 1, s, LATENT)
        turning = self.turn(turning.view(b, 1, s, TURNING), cos, sin)
        latent, turning = self.before(self, x, latent, turning, cos, sin)
        if cache is not None:
            latent, turning = cache.update(latent, turning, 0)
        latent, turning = self.after(self, x, latent, turning, cos, sin)
        both = self.up(latent).view(b, latent.shape[2], HEADS, -1).transpose(1, 2)
        k, v = both.split([self.still, self.values], -1)
        turning = turning.expand(-1, HEADS, -1, -1)
        if self.written:
            keys = k.new_empty(*k.shape[:-1], self.still + TURNING)
            keys[..., self.still :].copy_(turning)
            keys[..., : self.still].copy_(k)
            k = keys
        else:
            k = torch.cat([k, turning], -1)
        q = torch.cat([q, self.turn(q_turning, cos, sin)], -1)
        if mask is None or self.seen:
            k, v = (t[:, :, : self.seen or s] for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


def call_of(module: nn.Module, cache: Any, length: int = LENGTH, total: int = 0) -> Example:
    """A call by so many tokens, of which the last ones are seen by a mask if there is a total."""
    angles = torch.randn(length, TURNING // 2, dtype=torch.float64)
    angles = torch.cat([angles, angles], -1)
    mask = None
    if total:
        mask = torch.randn(BATCH, 1, length, total, dtype=torch.float64)
    x = stream(BATCH, length, WIDTH).requires_grad_()
    return Example(module, (x, angles.cos(), angles.sin(), mask, cache))


SIZES = [(6, 7), (6, 10), (4, 8), (3, 5)]


@pytest.mark.parametrize("turn", [turned, neighbors])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("written", [False, True])
def test_a_call_without_a_cache(turn: Any, sizes: tuple[int, int], written: bool) -> None:
    module = Latent(turn, *sizes)
    module.written = written
    operations = [*operations_in(assert_recomputed(call_of(module, None)).operations)]
    found = {(r.heads.keys, r.size, r.interleaved) for r in operations if isinstance(r, Rotary)}
    of_one_size = sizes[0] + TURNING == sizes[1]
    assert found == {(HEADS if of_one_size else 0, TURNING, turn is neighbors)}


@pytest.mark.parametrize("turn", [turned, neighbors, as_given])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_call_with_an_empty_cache(turn: Any, sizes: tuple[int, int]) -> None:
    module = Latent(turn, *sizes)
    for total in (0, LENGTH):
        reading = assert_recomputed(call_of(module, transformers.DynamicCache(), total=total))
    operations = [type(op) for op in operations_in(reading.operations)]
    assert operations.count(ForkedAttention) == operations.count(Cached) == 1
    assert operations.count(Rotary) == (0 if turn is as_given else 2)


def static_cache() -> Any:
    config = transformers.LlamaConfig(num_hidden_layers=1)
    return transformers.StaticCache(config=config, max_cache_len=2 * LENGTH)


@pytest.mark.parametrize("turn", [turned, neighbors])
@pytest.mark.parametrize("make", [transformers.DynamicCache, static_cache])
def test_calls_with_a_cache_that_is_not_empty(turn: Any, make: Callable[[], Any]) -> None:
    module, cache, seen = Latent(turn), make(), 0
    with torch.no_grad():
        for length in (3, 1, 1, 2):
            seen += length
            total = 2 * LENGTH if make is static_cache else seen
            first = seen == length
            example = call_of(module, cache, length, 0 if first else total)
            assert_recomputed(example)
            example.module(*example.args)
    assert cache.get_seq_length() == seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layers_with_a_cache(family: str, attention: str) -> None:
    model: Any = model_of(family, attention, use_cache=True).eval()
    example = layer_of(model)
    kept = example.cache()
    assert kept is not None
    assert kept.get_seq_length() == 0
    assert operation_in(assert_recomputed(example), Cached)


def test_a_factor_of_what_is_kept() -> None:
    def scaled(m: Any, x: Tensor, latent: Tensor, turning: Tensor, *_: Tensor) -> Any:
        return 1.5 * latent, 0.5 * turning

    assert_recomputed(call_of(Latent(before=scaled), transformers.DynamicCache()))


def late_turn(m: Any, x: Tensor, latent: Tensor, turning: Tensor, *tables: Tensor) -> Any:
    return latent, turned(turning, *tables)


KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "turned later": ({"after": late_turn}, "normalizes or turns what its cache returns"),
    "keys of the input": (
        {"after": lambda m, x, a, b, *_: (a, m.down(x)[:, None, :, LATENT:])},
        "attends beside its cache to keys",
    ),
    "latents of the input": (
        {"after": lambda m, x, a, b, *_: (m.norm(m.down(x)[:, None, :, :LATENT]), b)},
        "attends beside its cache to keys",
    ),
    "changed": ({"after": lambda m, x, a, b, *_: (a + 1, b)}, "attends beside its cache to keys"),
    "scaled": ({"after": lambda m, x, a, b, *_: (2 * a, b)}, "attends beside its cache to keys"),
    "normalized later": (
        {"after": lambda m, x, a, b, *_: (F.rms_norm(a, (LATENT,), None, 1e-5), b)},
        "attends beside its cache to keys",
    ),
    "other tokens": (
        {"after": lambda m, x, a, b, *_: (a.flip(2), b.flip(2))},
        "computes flip, which attention reads",
    ),
    "other rows": (
        {"before": lambda m, x, a, b, *_: (a.flip(0), b)},
        "computes flip",
    ),
    "two dtypes": ({"before": lambda m, x, a, b, *_: (a, b.float())}, "two dtypes"),
    "rows of two heads": (
        {
            "before": lambda m, x, a, b, *_: (
                a.unflatten(-1, (2, -1)).squeeze(1).transpose(1, 2),
                b.unflatten(-1, (2, -1)).squeeze(1).transpose(1, 2),
            ),
            "after": lambda m, x, a, b, *_: (
                a.transpose(1, 2).flatten(2).unsqueeze(1),
                b.transpose(1, 2).flatten(2).unsqueeze(1),
            ),
        },
        "joins heads of several inputs",
    ),
    "clipped": ({"before": lambda m, x, a, b, *_: (a.clamp(-1, 1), b)}, "computes clamp"),
    "turned part clipped": (
        {"before": lambda m, x, a, b, *_: (a, b.clamp(-1, 1))},
        "computes clamp",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_else_is_done_is_kept(name: str) -> None:
    given, reason = KEPT[name]
    example = call_of(Latent(**given), transformers.DynamicCache())
    with pytest.raises(KeptError, match=reason):
        build(read_of(example), example.module)


def test_some_of_what_a_cache_returns() -> None:
    """As many as there are queries are enough where causality hides the others."""
    for total, reason in ((0, "attends to some of what its cache returns"), (5, "other rows")):
        module = Latent()
        module.seen = 5
        example = call_of(module, transformers.DynamicCache(), total=total)
        with torch.no_grad(), pytest.raises(KeptError, match=reason):
            read(trace(*example).dataflow)


def test_tokens_that_are_not_those_of_the_queries() -> None:
    def later(m: Any, x: Tensor, latent: Tensor, turning: Tensor, *_: Tensor) -> Any:
        return latent[:, :, 1:], turning[:, :, 1:]

    example = call_of(Latent(before=later), transformers.DynamicCache(), total=LENGTH - 1)
    with torch.no_grad(), pytest.raises(KeptError, match="has a cache keep other tokens than"):
        read(trace(*example).dataflow)


@pytest.mark.parametrize("turn", [turned, neighbors])
@pytest.mark.parametrize("masked", [False, True])
def test_no_operation_is_overlooked(turn: Any, masked: bool) -> None:
    example = call_of(Latent(turn), transformers.DynamicCache(), total=LENGTH * masked)
    assert outcomes_of(example, 0, 5)["recomputed"] > 0

"""Generation: calls that continue earlier ones are those of the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser import DotProductAttention, KVCache, Linear, RotaryEmbedding, Sequential
from opfuser.errors import ArgumentError, InputError, NotSupportedError

CACHES = pytest.mark.parametrize("max_length", [None, 12], ids=["growing", "preallocated"])
MODES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 4},
    "ALiBi, soft-capping": {"alibi": True, "softcap": 1.0},
    "sinks": {"sinks": True},
}
STEPS = [5, 1, 1, 3, 1]


def in_steps(call: Any, x: Tensor) -> Tensor:
    return torch.cat([call(part.contiguous()) for part in x.split(STEPS, 1)], 1)


@CACHES
@pytest.mark.parametrize("name", MODES)
def test_steps_are_as_the_whole(name: str, max_length: int | None) -> None:
    op, x = DotProductAttention(4, 2, **MODES[name]).double(), torch.randn(2, 11, 48).double()
    cache = KVCache(max_length)
    with torch.no_grad():
        want = op(x)
        for _ in range(2):
            got = in_steps(lambda part: op(part, cache=cache), x)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            assert int(cache.length) == 11
            cache.reset()


@CACHES
def test_padded_batch(max_length: int | None) -> None:
    """The mask has as many keys as the cache returns."""
    op, x = DotProductAttention(2), torch.randn(2, 11, 24)
    seen = torch.ones(2, 12, dtype=torch.bool)
    seen[1, :3] = False
    cache, at = KVCache(max_length), 0
    with torch.no_grad():
        want = op(x, mask=seen[:, :11])
        for part in x.split(STEPS, 1):
            keys = max_length or at + part.shape[1]
            additive = torch.zeros(2, keys).masked_fill(~seen[:, :keys], -torch.inf)
            for mask in (additive, seen[:, :keys])[at % 2 :][:1]:
                y = op(part.contiguous(), mask=mask, cache=cache)
            torch.testing.assert_close(y, want[:, at : at + part.shape[1]])
            at += part.shape[1]


def test_cross_attention_sees_no_position_that_is_not_filled() -> None:
    op = DotProductAttention(2, layout="separate", causal=False)
    q, kv, cache = torch.randn(1, 2, 8), torch.randn(1, 2, 8), KVCache(6)
    with torch.no_grad():
        torch.testing.assert_close(op(q, kv, kv, cache=cache), op(q, kv, kv))


def test_in_a_sequence_with_positions() -> None:
    model = Sequential(Linear(8, 24), RotaryEmbedding(2, 4), DotProductAttention(2), Linear(8, 8))
    x, cache = torch.randn(2, 11, 8), KVCache()

    def step(part: Tensor) -> Tensor:
        positions = cache.length + torch.arange(part.shape[1])
        return model(part, op_kwargs={1: {"positions": positions}, 2: {"cache": cache}})

    with torch.no_grad():
        torch.testing.assert_close(in_steps(step, x), model(x))


def test_what_was_kept_in_inference_mode_can_be_continued_outside() -> None:
    op, x = DotProductAttention(2), torch.randn(1, 3, 24)
    for cache in (KVCache(), KVCache(8)):
        with torch.inference_mode():
            op(x, cache=cache)
        with torch.no_grad():
            op(x, cache=cache)
        assert int(cache.length) == 6


def test_the_first_call_has_gradients_and_later_ones_do_not() -> None:
    op, x, cache = DotProductAttention(2), torch.randn(1, 3, 24, requires_grad=True), KVCache()
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (op(x, cache=cache), op(x))]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    for other in (cache, KVCache(8)):
        with pytest.raises(NotSupportedError, match=r"no gradients.*3 keys of this call, [68] in"):
            op(x, cache=other)


def test_layers_of_a_cache_of_transformers_fit() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    op, x, cache = DotProductAttention(4, 2), torch.randn(2, 11, 48), transformers.DynamicCache()
    x_of_layer_0 = torch.randn(1, 2, 1, 6)
    cache.update(x_of_layer_0, x_of_layer_0, 0)
    layer = type(cache.layers[0])()
    with torch.no_grad():
        got = in_steps(lambda part: op(part, cache=layer), x)
        torch.testing.assert_close(got, op(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_step_is_not_compiled_again() -> None:
    torch.compiler.reset()
    model = Sequential(Linear(8, 24), DotProductAttention(2, window=5), Linear(8, 8))
    caches = KVCache(12), KVCache(12)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    step: Any = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(2, 9, 8)
    with torch.no_grad():
        for cache in caches:
            model(x[:, :3].contiguous(), op_kwargs={1: {"cache": cache}})
        for n in range(3, 9):
            x_n = x[:, n : n + 1].contiguous()
            got, want = (
                call(x_n, op_kwargs={1: {"cache": cache}})
                for call, cache in zip((step, model), caches)
            )
            torch.testing.assert_close(got, want)
    assert len(graphs) == 1


@CACHES
def test_refuses(max_length: int | None) -> None:
    cache, k = KVCache(max_length), torch.zeros(2, 3, 4, 5)
    cache.update(k, k)
    for other in (k[:1], k[:, :1], k[..., :1], k.double()):
        for name, pair in (("keys", (other, k)), ("values", (k, other))):
            text = rf"The {name} of a cache have one batch.*\(2, 3\), 5, torch.float32, cpu.*each"
            with pytest.raises(InputError, match=text):
                cache.update(*pair)
    assert int(cache.length) == 4


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"max_length must be positive.*max_length=0"):
        KVCache(0)
    with pytest.raises(InputError, match=r"13 positions, max_length=12"):
        KVCache(12).update(*torch.zeros(2, 1, 1, 13, 4))
    cache = KVCache(2)
    cache.update(*torch.zeros(2, 1, 1, 2, 4))
    with pytest.raises(IndexError):
        cache.update(*torch.zeros(2, 1, 1, 1, 4))

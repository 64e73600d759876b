"""Generation: calls that continue earlier ones are those of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from opfuser import (
    ConstantScale,
    DotProductAttention,
    KVCache,
    Linear,
    RotaryEmbedding,
    Sequential,
)
from opfuser.attention.choice import KERNELS
from opfuser.errors import ArgumentError, CacheFullError, InputError, NotSupportedError

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
    text = r"no more than max_length .* 1 positions, max_length=2, of which 2 are filled\. .*reset"
    with pytest.raises(CacheFullError, match=text) as caught:
        cache.update(*torch.zeros(2, 1, 1, 1, 4))
    assert isinstance(caught.value, IndexError)
    assert int(cache.length) == 2
    k = torch.zeros(1, 1, 2, 4)
    for other in (k[:, :, :1], k[0]):
        with pytest.raises(InputError, match=r"one batch, number of heads and number of pos.*keys"):
            KVCache().update(k, other)


class Refused(NamedTuple):
    """A call that is refused after five positions of two rows, and what it says."""

    error: type[Exception]
    text: str
    keywords: Mapping[str, Any] = MappingProxyType({})
    arguments: Mapping[str, Any] = MappingProxyType({})
    change: Callable[[Tensor], Tensor] = torch.clone


ENDS = torch.tensor([0, 3], dtype=torch.int32)
REFUSED = {
    "gradients": Refused(
        NotSupportedError, "Call under torch.no_grad", change=torch.Tensor.requires_grad_
    ),
    "a mask of another length": Refused(
        InputError, "mask must be", {"mask": torch.ones(2, 3).bool()}
    ),
    "a mask of integers": Refused(InputError, "by .bool", {"mask": torch.ones(2, 8).long()}),
    "a mask that is trained": Refused(
        NotSupportedError, "mask.detach", {"mask": torch.ones(2, 8, requires_grad=True)}
    ),
    "cu_seqlens": Refused(
        InputError,
        "there is no cache.*, a cache",
        {"cu_seqlens": ENDS, "max_seqlen": 3},
        change=lambda x: x[:1],
    ),
    "max_seqlen alone": Refused(InputError, "come together", {"max_seqlen": 3}),
    "another batch": Refused(InputError, "for each batch", change=lambda x: x[:1]),
    "another dtype": Refused(InputError, "one batch, .*float64", change=torch.Tensor.float),
    "a kernel that cannot": Refused(
        NotSupportedError, "it runs on a GPU", arguments={"kernel": "flash"}
    ),
    "a kernel that fails": Refused(RuntimeError, "out of memory", arguments={"kernel": "failing"}),
}


def fail(*_: Any) -> Any:
    raise RuntimeError("out of memory")


def state(cache: KVCache) -> tuple[int, int | None]:
    """What the next call reads, besides the keys and values that its output tells of."""
    return int(cache.length), None if cache.start is None else int(cache.start)


@CACHES
@pytest.mark.parametrize("how", ["alone", "in a sequence"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_stores_nothing(
    name: str, how: str, max_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first one nor a later one; the call that the error asks for is as the whole."""
    case = REFUSED[name]
    failing = KERNELS["cpu"]._replace(refusal=lambda _: None, forward=fail)
    monkeypatch.setitem(KERNELS, "failing", failing)  # behind one that takes every call
    x = torch.randn(2, 8, 48, dtype=torch.float64)
    op, refusing = (DotProductAttention(4, 2, **more) for more in ({}, case.arguments))
    cache, first = KVCache(max_length), KVCache(max_length)

    def call(part: Tensor, cache: KVCache, **keywords: Any) -> Tensor:
        if how == "alone":
            return refusing(part, cache=cache, **keywords)  # type: ignore[no-any-return]
        kwargs = {refusing: {"cache": cache, **keywords}}
        y: Tensor = Sequential(ConstantScale(1.0), refusing)(part, op_kwargs=kwargs)
        return y

    with torch.no_grad():
        want = op(x)
        op(x[:, :5], cache=cache)
    before = state(cache)
    with pytest.raises(case.error, match=case.text):
        call(case.change(x[:, 5:].clone()), cache, **case.keywords)
    assert state(cache) == before
    with torch.no_grad():
        torch.testing.assert_close(op(x[:, 5:], cache=cache), want[:, 5:])
    if name in ("cu_seqlens", "max_seqlen alone", "a kernel that cannot", "a kernel that fails"):
        with pytest.raises(case.error, match=case.text):
            call(case.change(x[:, 5:].clone()), first, **case.keywords)
        assert first.length == 0
        first.update(*torch.zeros(2, 1, 1, 1, 3))  # it is not yet one for calls of some kind


@CACHES
def test_a_sequence_that_fails_later_stores_nothing(max_length: int | None) -> None:
    """Caches of all operations would else have different lengths."""
    one, two = DotProductAttention(2), DotProductAttention(2)
    inner = Sequential(two, Linear(8, 8))
    model = Sequential(Linear(8, 24), one, Linear(8, 24), inner, Failing())
    x, caches = torch.randn(1, 6, 8), [KVCache(max_length) for _ in range(2)]
    kwargs = {op: {"cache": cache} for op, cache in zip((one, two), caches)}
    wrong = {**kwargs, two: {"cache": caches[1], "mask": torch.ones(1, 1).bool()}}
    with torch.no_grad():
        want = model(x)
        got = [model(x[:, :4].contiguous(), op_kwargs=kwargs)]
        before = [state(cache) for cache in caches]
        with pytest.raises(InputError, match="mask must be"):
            model(x[:, 4:].contiguous(), op_kwargs=wrong)
        model[-1].fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            model(x[:, 4:].contiguous(), op_kwargs=kwargs)
        model[-1].fails = False
        assert [state(cache) for cache in caches] == before
        got.append(model(x[:, 4:].contiguous(), op_kwargs=kwargs))
    torch.testing.assert_close(torch.cat(got, 1), want)


class Failing(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        return fail() if self.fails else x  # type: ignore[no-any-return]


def test_a_sequence_has_a_cache_for_each_operation() -> None:
    one, two, cache = DotProductAttention(1, v_head_dim=24), DotProductAttention(1), KVCache()
    kwargs = {0: {"cache": cache}, 1: {"cache": cache}}
    text = "belongs to one operation, .* a second call in one call of a sequence. Make a cache for"
    with torch.no_grad(), pytest.raises(InputError, match=text):
        Sequential(one, two)(torch.randn(1, 3, 40), op_kwargs=kwargs)
    assert cache.length == 0


def test_a_cache_of_ones_own_is_asked_by_its_own_method() -> None:
    class Halved(KVCache):
        def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return super().update(k, v / 2)

    op, x = DotProductAttention(2), torch.randn(1, 3, 24)
    with torch.no_grad():
        want = op(x) / 2
        torch.testing.assert_close(op(x, cache=Halved()), want)
        model, cache = Sequential(op), Halved()
        torch.testing.assert_close(model(x, op_kwargs={0: {"cache": cache}}), want)
    assert cache.length == 3


def test_memory_of_what_was_forgotten_hides_nothing() -> None:
    """NaN times a weight of 0 is NaN."""
    op, x, cache = DotProductAttention(1), torch.randn(1, 2, 12), KVCache(4)
    with torch.no_grad():
        op(torch.full((1, 4, 12), torch.nan), cache=cache)
        cache.reset()
        torch.testing.assert_close(op(x, cache=cache), op(x))


@pytest.mark.parametrize("sliding", [False, True])
def test_a_refused_call_stores_nothing_in_a_layer_of_transformers(sliding: bool) -> None:
    caches = pytest.importorskip("transformers.cache_utils", reason="transformers is not installed")
    window = 3 if sliding else None
    layer = caches.DynamicSlidingWindowLayer(3) if sliding else caches.DynamicLayer()
    op, x = DotProductAttention(4, 2, window=window), torch.randn(2, 8, 48)
    with torch.no_grad():
        want = op(x)
        for start in (0, 5):
            with pytest.raises(InputError, match="mask must be"):
                op(x[:, start:], mask=torch.ones(2, 2).bool(), cache=layer)
            stop = 5 if start == 0 else 8
            y = op(x[:, start:stop], cache=layer)
            torch.testing.assert_close(y, want[:, start:stop])
    with pytest.raises(NotSupportedError, match="no gradients"):
        op(x.requires_grad_(), cache=layer)
    assert layer.get_seq_length() == 8


def test_refuses_caches_with_room_that_do_not_say_where_queries_begin() -> None:
    caches = pytest.importorskip("transformers.cache_utils", reason="transformers is not installed")
    layer = caches.StaticLayer(12)
    text = r"must say where queries begin .* StaticLayer\. Pass KVCache\(max_length\)"
    with torch.no_grad(), pytest.raises(NotSupportedError, match=text):
        DotProductAttention(4, 2)(torch.randn(2, 8, 48), cache=layer)
    assert layer.get_seq_length() == 0

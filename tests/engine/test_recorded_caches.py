"""Calls with caches are recorded where what they get from these has one layout in every call.

Results, gradients and what the caches hold are those of any other call.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opfuser import DotProductAttention, KVCache, LayerNorm, Linear, Residual, RMSNorm, Sequential
from opfuser.attention.cache import StoresLast
from opfuser.engine.recorded.recordable import unrecorded
from opfuser.errors import CacheFullError
from opfuser.models import DecoderConfig, decoder_lm, generate
from opfuser.op import BasicOperation
from tests.engine.recorded_toys import ENOUGH, D, assert_same, image, passes, twin

LENGTH = 3  # of images


def block() -> Sequential:
    """A block of a decoder, whose attention is :data:`ATTENTION`."""
    return Sequential(
        LayerNorm(D), Linear(D, 3 * D), DotProductAttention(2), Linear(D, D), RMSNorm(D)
    )


ATTENTION = 2


def layer_of_transformers() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.cache_utils.DynamicLayer()


def cleared() -> KVCache:
    """Has memory from before."""
    cache = KVCache()
    cache.update(*torch.ones(2, 2, 2, 70, D // 2))
    cache.reset()
    return cache


def sliding_layer(window: int = 2) -> Any:
    kind: Any = type(layer_of_transformers())
    made = next(k for k in kind.__subclasses__() if k.__name__ == "DynamicSlidingWindowLayer")
    return made(sliding_window=window)


FRESH: dict[str, Callable[[], Any]] = {
    "growing": KVCache,
    "exactly full": lambda: KVCache(LENGTH),  # of which gradients exist
    "cleared": cleared,
    "layer": layer_of_transformers,
    "sliding layer": sliding_layer,
}
each_fresh = pytest.mark.parametrize("fresh", FRESH.values(), ids=FRESH)


def held(cache: Any, x: Tensor) -> list[Tensor]:
    """What a cache holds after a call with ``x``, and how much of it counts."""
    found = [getattr(cache, name, None) for name in ("keys", "values", "length", "start")]
    if isinstance(cache, KVCache):
        nothing = x.new_empty(len(x), 2, 0, D // 2)
        found = [*copy.deepcopy(cache).update(nothing, nothing), *found]
    return [torch.as_tensor(t) for t in found if t is not None]


def called(module: Any, x: Tensor, cache: Any) -> Tensor:
    y: Tensor = module(x, op_kwargs={ATTENTION: {"cache": cache}})
    return y


def trained(module: nn.Module, x: Tensor, cache: Any) -> list[Tensor]:
    """The output, the gradients, and what the cache holds."""
    y = called(module, x, cache)
    grads = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
    return [y, *grads, *held(cache, x)]


def inferred(module: nn.Module, x: Tensor, cache: Any) -> list[Tensor]:
    with torch.no_grad():
        return [called(module, x, cache), *held(cache, x)]


def record(
    module: nn.Module, fresh: Callable[[], Any], call: Callable[..., list[Tensor]] = inferred
) -> None:
    """Calls a module with fresh caches until its passes are recorded."""
    for _ in range(ENOUGH):
        call(module, image(), fresh())
    with passes() as names:
        call(module, image(), fresh())
    assert names == (["forward", "backward"] if call is trained else ["forward"])


def plain(module: nn.Module) -> nn.Module:
    """A module like it that records nothing."""
    with unrecorded():
        other = twin(block, module)
        inferred(other, image(), KVCache())
        trained(other, image(), KVCache())
    return other


@pytest.mark.parametrize("call", [trained, inferred])
@each_fresh
def test_results_and_caches_are_those_of_any_call(
    fresh: Callable[[], Any], call: Callable[..., list[Tensor]]
) -> None:
    module = block()
    record(module, fresh, call)
    other = plain(module)
    for _ in range(2):
        x = image()
        with passes() as names:
            ours = call(module, x, fresh())
        assert "forward" in names
        with unrecorded():
            assert_same(ours, call(other, x, fresh()))


def in_steps(module: nn.Module, x: Tensor, cache: Any) -> tuple[list[Tensor], int]:
    """Outputs and what the cache holds after each step, and how many passes were recorded ones."""
    results: list[Tensor] = []
    with passes() as names, torch.no_grad():
        for part in x.split([3, 1, 1, 2, 1, 2], 1):
            results += [called(module, part.contiguous(), cache)]
            results += [t.clone() for t in held(cache, x)]
    return results, len(names)


@pytest.mark.parametrize(
    ("fresh", "recorded"),
    [(lambda: KVCache(12), 6), (KVCache, 1), (layer_of_transformers, 1)],
    ids=["preallocated", "growing", "layer"],
)
def test_steps_of_generation(fresh: Callable[[], Any], recorded: int) -> None:
    """Without memory for all positions, keys are more at every step, which is not recorded."""
    module = block()
    for _ in range(ENOUGH):
        in_steps(module, torch.randn(2, 10, D), fresh())
    x = torch.randn(2, 10, D)
    ours, count = in_steps(module, x, fresh())
    assert count == recorded
    with unrecorded():
        theirs, _ = in_steps(plain(module), x, fresh())
    assert_same(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("fresh", [lambda: KVCache(12), KVCache], ids=["preallocated", "growing"])
def test_steps_of_generation_on_a_gpu(fresh: Callable[[], Any]) -> None:
    module = block().to("cuda", torch.bfloat16)
    x = torch.randn(2, 10, D, device="cuda", dtype=torch.bfloat16)
    for _ in range(ENOUGH):
        in_steps(module, x, fresh())
    ours, _ = in_steps(module, x, fresh())
    with unrecorded():
        theirs, _ = in_steps(copy.deepcopy(module), x, fresh())
    assert_same(ours, theirs)


def test_generated_tokens() -> None:
    """What the first texts have recorded serves the next one."""
    model = decoder_lm(DecoderConfig(50, D, 1, 2, ffn_dim=D))
    prompts = torch.randint(50, (3, 1, 4))
    for prompt in prompts[:2]:
        generate(model, prompt, 6, static_cache=True)
    with passes() as names:
        ours = generate(model, prompts[2], 6, static_cache=True)
    assert len(names) == 2 + 5, "the body and the head for the prompt, and a pass for each token"
    with unrecorded():
        assert torch.equal(ours, generate(copy.deepcopy(model), prompts[2], 6, static_cache=True))


class _Twice(KVCache):
    """Returns keys of its own."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(k, v)
        return keys * 2, values


class _Doubled(KVCache):
    """Likewise, in another place."""

    def extended(self, k: Tensor, v: Tensor) -> Any:
        return super().extended(k * 2, v)


class _Own:
    """A cache of somebody's own."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([k, k], 2), torch.cat([v, v], 2)


class _Stores(StoresLast):
    """A cache that stores last, and says nothing of its state."""

    def extended(self, k: Tensor, v: Tensor) -> Any:
        return KVCache().extended(k * 2, v)


def filled() -> KVCache:
    cache = KVCache()
    cache.update(*torch.ones(2, 2, 2, 5, D // 2))
    return cache


def filled_layer() -> Any:
    layer = layer_of_transformers()
    layer.update(*torch.ones(2, 2, 2, 5, D // 2))
    return layer


def layer_with_its_own_update() -> Any:
    layer = layer_of_transformers()
    layer.update = lambda k, v: (torch.cat([k, k], 2), torch.cat([v, v], 2))
    return layer


RECORDED: dict[str, Callable[[], Any]] = {
    "more room": lambda: KVCache(12),
    "wider window": lambda: sliding_layer(5),
}
OTHERS = {
    **{kind.__name__: kind for kind in (_Twice, _Doubled, _Own, _Stores)},
    "filled": filled,
    "filled layer": filled_layer,
    "layer with its own update": layer_with_its_own_update,
    **RECORDED,
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("recorded", ["growing", "exactly full", "sliding layer"])
def test_caches_of_other_kinds(recorded: str, kind: str) -> None:
    other: Any = OTHERS[kind]
    module = block()
    record(module, FRESH[recorded])
    x = image()
    with unrecorded():
        theirs = inferred(plain(module), x, other())
    for _ in range(ENOUGH):
        with passes() as names:
            assert_same(inferred(module, x, other()), theirs)
    assert bool(names) == (kind in RECORDED)


class Asking(DotProductAttention):
    """Asks a cache for more than keys and values."""

    recordable = True

    def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
        number = float(getattr(kwargs["cache"], "number", 1.0))
        return super().op_forward(ctx, input_ * number, **kwargs)


def test_what_else_a_cache_tells_is_no_constant() -> None:
    module = Sequential(Linear(D, 3 * D), RMSNorm(3 * D), Asking(2))
    x = image()
    for number in (1.0,) * ENOUGH + (2.0, 3.0):
        cache: Any = KVCache()
        cache.number = number
        ours = inferred(module, x, cache)
    assert torch.equal(ours[1][:, :, :LENGTH], 3 * inferred(module, x, KVCache())[1][:, :, :LENGTH])


class Shifts(BasicOperation):
    """Adds a number that it is given."""

    recordable = True

    def op_forward(self, ctx: Any, input_: Tensor, *, number: Tensor, **kwargs: Any) -> Tensor:
        return input_ + number


def test_the_length_of_a_cache_as_another_keyword() -> None:
    """A tensor that a cache returns may be one that the call has been given."""
    module = Sequential(Linear(D, 3 * D), RMSNorm(3 * D), DotProductAttention(2), Shifts())
    x, cache = image(), KVCache(100)

    def call(number: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = module(x, op_kwargs={2: {"cache": cache}, 3: {"number": number}})
        return y

    call(torch.zeros((), dtype=torch.int64))
    for _ in range(ENOUGH):
        call(cache.length)
    cache.reset()
    for shift in (5, 7):
        first = call(torch.tensor(shift))
        cache.reset()
        torch.testing.assert_close(first - shift, call(torch.tensor(0)))
        cache.reset()


def test_a_cache_within_called_sequences() -> None:
    def make() -> Sequential:
        module = Sequential(Residual(block()), RMSNorm(D))
        module[0].register_forward_hook(lambda *_: None)
        return module

    def call(module: Any) -> list[Tensor]:
        op = next(m for m in module.modules() if isinstance(m, DotProductAttention))
        cache = KVCache()
        with torch.no_grad():
            return [module(x, op_kwargs={op: {"cache": cache}}), *held(cache, x)]

    module, x = make(), image()
    for _ in range(ENOUGH):
        call(module)
    with passes() as names:
        ours = call(module)
    assert names == ["forward", "forward"]
    with unrecorded():
        assert_same(ours, call(twin(make, module)))


def filled_part(cache: KVCache, x: Tensor) -> list[Tensor]:
    """The keys and values that count."""
    return [t[:, :, : int(cache.length)] for t in held(cache, x)[:2]]


def test_a_call_that_fails_stores_nothing() -> None:
    """With the error of any other call, though an earlier operation has its keys and values."""

    def step(module: nn.Module) -> None:
        ops = [m for m in module.modules() if isinstance(m, DotProductAttention)]
        with torch.no_grad():
            module(x, op_kwargs={op: {"cache": cache} for op, cache in zip(ops, caches)})

    x, module = image(), Sequential(block(), block())
    other = copy.deepcopy(module)
    caches = KVCache(9 * LENGTH), KVCache(8 * LENGTH)
    for _ in range(8):
        step(module)
    before = [t.clone() for t in filled_part(caches[0], x)]
    texts = []
    for each in (module, other):
        with passes() as names, unrecorded(), pytest.raises(CacheFullError) as caught:
            step(each)
        assert names == ["forward"] * (each is module)
        assert [int(cache.length) for cache in caches] == [8 * LENGTH] * 2
        assert_same([t.clone() for t in filled_part(caches[0], x)], before)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert texts[0].endswith("It was raised in op 10 (DotProductAttention) of the sequence.")


def test_nothing_refers_to_a_cache() -> None:
    module = block()
    caches = []
    for _ in range(ENOUGH):
        cache = KVCache()
        trained(module, image(), cache)
        caches.append(weakref.ref(cache))
    del cache
    gc.collect()
    assert not any(ref() for ref in caches)


@pytest.mark.parametrize("train", [False, True])
def test_models_of_transformers(train: bool) -> None:
    """Their layers hand keys and values to the cache that the model makes in each call."""
    models = pytest.importorskip("tests.integrations.hf_models")

    def call(model: Any, tokens: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(train):
            result = model(input_ids=tokens, labels=tokens)
        kept = [t for layer in result.past_key_values.layers for t in (layer.keys, layer.values)]
        grads = torch.autograd.grad(result.loss, list(model.parameters())) if train else ()
        return [result.loss, result.logits, *kept, *grads]

    model = models.pair("llama").model
    other = copy.deepcopy(model)
    tokens = torch.randint(2, 61, (5, 2, 9))
    for rows in tokens[:ENOUGH]:
        call(model, rows)
    with passes() as names:
        ours = call(model, tokens[-1])
    layers = 3  # and the last norm
    assert names == ["forward"] * layers + ["backward"] * layers * train
    with unrecorded():
        assert_same(ours, call(other, tokens[-1]))

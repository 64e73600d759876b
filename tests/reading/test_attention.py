"""What is read of attention, and what of it is a reason to keep a module."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from opfuser.reading.construction import build
from opfuser.reading.grammar import read
from opfuser.reading.kept import KeptError
from opfuser.reading.operations import (
    Attention,
    CrossAttention,
    HeadNorm,
    Heads,
    Mask,
    Reorder,
    Rotary,
    Times,
)
from opfuser.reading.tracer import trace

from .families import layer_of, stream, turned
from .recomputed import Example, assert_recomputed, operations_in, read_of
from .tiny import BATCH, CACHE, LENGTH, model_of, transformers

HEADS, KEYS, SIZE = 4, 2, 8
WIDTH = HEADS * SIZE

Function = Callable[[Any, Tensor], Tensor]


class Attends(nn.Module):
    """Attention of which the parts are given: ``heads`` of projections, and ``core`` of these."""

    def __init__(self, heads: Any = None, core: Any = None, join: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.core, self.join = heads or split, core or causal, join or joined
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KEYS * SIZE), nn.Linear(WIDTH, KEYS * SIZE)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q_scale, self.k_scale = (nn.Parameter(torch.randn(SIZE)) for _ in range(2))
        self.register_buffer("table", torch.randn(LENGTH, SIZE))
        self.double()

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        q, k, v = self.heads(self, x, *others)
        return self.out(self.join(self.core(q, k, v, *others)))


def split(m: Attends, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    b, s, _ = x.shape
    return tuple(p(x).view(b, s, -1, SIZE).transpose(1, 2) for p in (m.q, m.k, m.v))


def causal(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def on_queries(function: Callable[..., Tensor]) -> Any:
    def heads(m: Attends, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(m, x)
        return function(m, q), k, v

    return heads


def on_both(function: Callable[..., Tensor]) -> Any:
    def heads(m: Attends, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(m, x)
        return function(m, q, *others), function(m, k, *others), v

    return heads


def example_of(*others: Tensor, **parts: Any) -> Example:
    return Example(Attends(**parts), (stream().requires_grad_(), *others))


def found(example: Example, kind: Any) -> Any:
    """The operation of a kind in what is read of a module, which computes the same."""
    reading = assert_recomputed(example)
    return next(op for op in operations_in(reading.operations) if isinstance(op, kind))


def angles(size: int) -> tuple[Tensor, Tensor]:
    half = torch.randn(LENGTH, size // 2, dtype=torch.float64)
    whole = torch.cat([half, half], -1)
    return whole.cos(), whole.sin()


MASK = torch.randn(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64)


def test_scaled_queries_and_repeated_keys_are_read() -> None:
    def heads(m: Attends, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(m, x)
        return 3 * q, k.repeat_interleave(2, 1) / 2, v.repeat_interleave(2, 1)

    assert found(example_of(heads=heads), Attention) == Attention(
        Heads(HEADS, KEYS, SIZE, SIZE), 1.5 * SIZE**-0.5, True
    )


def test_capped_scores_with_a_mask_are_read() -> None:
    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = 5.0 * torch.tanh(q @ k.mT * 0.25 / 5.0)
        return F.dropout(F.softmax(mask + scores, -1), 1.0, True) @ v

    mask = torch.randn(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64)
    attention = found(example_of(mask, core=core), Attention)
    assert attention == Attention(
        Heads(HEADS, KEYS, SIZE, SIZE), 0.25, False, 1.0, 5.0, (Mask(1, tuple(mask.shape)),)
    )


def test_heads_of_one_projection_in_another_order_are_read() -> None:
    def heads(m: Attends, x: Tensor) -> tuple[Tensor, ...]:
        return m.qkv(x).unflatten(-1, (HEADS, 3 * SIZE)).transpose(1, 2).chunk(3, -1)

    def swapped(m: Attends, x: Tensor) -> tuple[Tensor, ...]:
        v, q, k = m.qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        return q, k, v

    blocks = tuple(torch.arange(3 * HEADS).view(HEADS, 3).T.flatten().tolist())
    assert found(example_of(heads=heads), Reorder) == Reorder(blocks, SIZE, len(blocks))
    assert found(example_of(heads=swapped), Reorder) == Reorder((1, 2, 0), WIDTH, 3)


def test_a_part_of_what_a_projection_returns_is_read() -> None:
    def heads(m: Attends, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = m.qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        return q[..., 3:], k[..., :5], v[..., 1:7]

    example = Example(narrow(Attends(heads), 6), (stream().requires_grad_(),))
    reorder = found(example, Reorder)
    assert (reorder.size, reorder.count, len(reorder.blocks)) == (1, 96, HEADS * (5 + 5 + 6))


def ends_turn(m: Attends, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = split(m, x)
    return *(torch.cat([t[..., :4], turned(t[..., 4:], cos, sin)], -1) for t in (q, k)), v


def starts_turn(m: Attends, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """And values are smaller than keys."""
    q, k, v = split(m, x)
    q, k = (torch.cat([turned(t[..., :4], cos, sin), t[..., 4:]], -1) for t in (q, k))
    return q, k, v[..., :5]


class Cached(Attends):
    """Attention with a cache."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(self, x, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        return self.out(joined(causal(q, k, v)))


def narrow(module: Attends, size: int = 5) -> Attends:
    """With an output projection for values of that size."""
    module.out = nn.Linear(HEADS * size, WIDTH).double()
    return module


def test_heads_whose_ends_turn_are_not_cached() -> None:
    """As the cache would get their entries in the order in which they turn."""
    given = stream(), *angles(4)
    assert found(Example(Cached(ends_turn), (*given, None)), Rotary).size == 4
    cache = transformers.DynamicCache()
    with torch.no_grad(), pytest.raises(KeptError, match="turns the last entries of keys"):
        read(trace(Cached(ends_turn), (*given, cache), {}).dataflow)


def test_keys_that_are_scaled_are_not_cached() -> None:
    """As attention scales its scores, and the cache would get them without that."""
    given, cache = (stream(), *angles(4)), transformers.DynamicCache()
    module = Cached(lambda m, x, *_: [f * t for f, t in zip((1, 1.5, 1), split(m, x))])
    assert_recomputed(Example(module, (*given, None)))
    with torch.no_grad(), pytest.raises(KeptError, match="scales the keys that a cache keeps"):
        read(trace(module, (*given, cache), {}).dataflow)
    module = Cached(lambda m, x, *_: [f * t for f, t in zip((1.5, 1, 1), split(m, x))])
    with torch.no_grad():
        assert_recomputed(Example(module, (*given, cache)))


def test_keys_beside_values_of_another_size_are_cached() -> None:
    module = narrow(Cached(starts_turn))
    with torch.no_grad():
        assert_recomputed(Example(module, (stream(), *angles(4), transformers.DynamicCache())))


def test_heads_whose_ends_turn_after_a_norm() -> None:
    def heads(m: Attends, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(m, x)
        q, k = (F.rms_norm(t, (SIZE,), None, 1e-5) for t in (q, k))
        return *(torch.cat([t[..., :4], turned(t[..., 4:], cos, sin)], -1) for t in (q, k)), v

    with pytest.raises(KeptError, match="normalizes heads, and turns their last entries"):
        read_of(example_of(*angles(4), heads=heads))


class TellsMore(Cached):
    """Hands more to the cache than keys and values, as models of transformers do."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        def update(k: Tensor, v: Tensor, layer: int) -> Any:
            return cache.update(k, v, layer, {"scale": 2.0})

        return super().forward(x, cos, sin, SimpleNamespace(update=update))


class Scaling(transformers.cache_utils.DynamicLayer):
    def update(self, k: Tensor, v: Tensor, more: Any = None) -> Any:
        return super().update(k * more["scale"], v)


def test_a_cache_that_may_read_more_than_keys_and_values_gets_it() -> None:
    module = narrow(TellsMore(starts_turn))
    given = stream(), *angles(4)
    plain, scaling = transformers.DynamicCache(), transformers.DynamicCache()
    scaling.layers.append(Scaling())
    with torch.no_grad():
        assert_recomputed(Example(module, (*given, plain)))
        found = trace(module, (*given, plain), {})
        assert found.takes(found.key._replace(caches=(transformers.DynamicCache(),)), module)
        assert not found.takes(found.key._replace(caches=(scaling,)), module)
        with pytest.raises(KeptError, match="updates its cache with more than keys and values"):
            trace(module, (*given, scaling), {})


def test_norms_of_heads_beside_values_of_another_size() -> None:
    def heads(m: Attends, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(m, x)
        q, k = (F.rms_norm(t, (SIZE,), None, 1e-5) for t in (q, k))
        return q, k, v[..., :5]

    module = narrow(Attends(heads))
    with pytest.raises(KeptError, match="norms of heads beside values of another size"):
        read_of(Example(module, (stream(),)))


def test_a_part_of_heads_that_turns_after_a_norm_is_read() -> None:
    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale

    def heads(m: Attends, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(m, x)
        q, k = norm(q, m.q_scale), norm(k, m.k_scale)
        return *(torch.cat([turned(t[..., :4], cos, sin), t[..., 4:]], -1) for t in (q, k)), v

    example = example_of(*angles(4), heads=heads)
    sizes = Heads(HEADS, KEYS, SIZE, SIZE)
    assert found(example, Rotary) == Rotary(sizes, 4, False, (1, 2), "halves")
    assert found(example, HeadNorm) == HeadNorm(sizes, 1e-5, "q_scale", "k_scale")


def test_heads_that_turn_backwards_before_a_norm_are_read() -> None:
    def heads(m: Attends, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(m, x)
        q, k = (turned(t, cos, -sin) for t in (q, k))
        return 1.5 * F.rms_norm(q, (SIZE,), None, 1e-5), F.rms_norm(k, (SIZE,), None, 1e-5), v

    example = example_of(*angles(SIZE), heads=heads)
    sizes = Heads(HEADS, KEYS, SIZE, SIZE)
    assert found(example, Rotary) == Rotary(sizes, SIZE, False, (1, 2), "halves", backwards=True)
    assert found(example, HeadNorm) == HeadNorm(sizes, 1e-5, None, None)
    assert found(example, Attention).scale == 1.5 * SIZE**-0.5


def of_memory(m: Attends, x: Tensor, memory: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    q, k, v = split(m, x)[0], *split(m, memory)[1:]
    return q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_to_another_input_is_read(fused: bool, masked: bool) -> None:
    def heads(m: Attends, x: Tensor, memory: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        memory = F.layer_norm(memory, (WIDTH,)) * 0.5
        if not fused:
            return of_memory(m, x, memory)
        q, v, k = m.q(x), *m.qkv(memory)[..., : 2 * WIDTH].chunk(2, -1)
        return tuple(t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in (q, k, v))

    def core(q: Tensor, k: Tensor, v: Tensor, memory: Tensor, *masks: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, *masks, scale=0.5)

    masks = [torch.rand(BATCH, 1, LENGTH, LENGTH + 4) > 0.3] if masked else []
    memory = torch.randn(BATCH, LENGTH + 4, WIDTH, dtype=torch.float64, requires_grad=True)
    example = example_of(memory, *masks, heads=heads, core=core)
    kind = found(example, CrossAttention)
    assert (kind.input, kind.attention.scale, len(kind.attention.masks)) == (1, 0.5, masked)
    assert kind.attention.heads == Heads(HEADS, HEADS if fused else KEYS, SIZE, SIZE)


def test_masks_that_are_joined_are_read() -> None:
    lowest = torch.finfo(torch.float64).min
    parts = [torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64), MASK > 0, MASK]

    def core(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hides: Tensor, mask: Tensor) -> Tensor:
        joint = torch.where(hides, bias + mask, lowest)
        return F.scaled_dot_product_attention(q, k, v, joint, enable_gqa=True)

    def summed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hides: Tensor, mask: Tensor) -> Any:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return (bias + q @ k.mT + mask).softmax(-1) @ v

    example = example_of(*parts, core=core)
    with pytest.raises(KeptError, match="adds several biases"):  # there is one for a gradient
        read_of(example)
    assert len(found(example_of(*parts, core=summed), Attention).masks) == 2
    with torch.no_grad():
        kind = next(
            op for op in operations_in(read_of(example).operations) if isinstance(op, Attention)
        )
        assert [(mask.input, mask.lowest) for mask in kind.masks] == [
            (1, None),
            (3, None),
            (2, lowest),
        ]
        got = build(read_of(example), example.module)(example.inputs())
        torch.testing.assert_close(got, example.module(*example.args))
    with pytest.raises(KeptError, match="are not all numbers"):
        read_of(example_of(parts[1], core=lambda q, k, v, m: summed(q, k, v, m, m, m)))


def test_sinks_are_read() -> None:
    order = list(range(HEADS))

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        sinks = torch.stack([example.module.sinks[n] for n in order])
        sinks = sinks.view(1, -1, 1, 1).expand(BATCH, -1, LENGTH, 1)
        scores = torch.cat([q @ k.mT * 0.3 + mask, sinks], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return F.dropout(scores.softmax(-1)[..., :-1], 0.5, False) @ v

    example = example_of(MASK, core=core)
    example.module.sinks = nn.Parameter(torch.randn(HEADS, dtype=torch.float64))
    assert found(example, Attention).sinks == "sinks"
    order.reverse()
    with pytest.raises(KeptError, match="takes a part of the weights of attention"):
        read_of(example)


def test_a_gate_of_what_attention_returns_is_read() -> None:
    def join(y: Tensor) -> Tensor:
        return joined(y) * 3 * torch.sigmoid(example.module.qkv(example.args[0]))

    example = example_of(join=join)
    example.module.qkv = nn.Linear(WIDTH, WIDTH).double()
    assert len(found(example, Times).branches) == 2


def test_what_is_around_a_reading_does_not_matter() -> None:
    dataflow = trace(*layer_of(model_of("gpt_neox").eval())).dataflow
    want = read(dataflow)
    with torch.device("meta"), FakeTensorMode():
        assert read(dataflow) == want


def stretched(m: Attends, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turned(x, cos, 2 * sin)


def of_the_module(m: Attends, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turned(x, m.table, m.table)


def products(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = q @ k.mT
    return F.softmax(scores.masked_fill(scores > 1, -1.0), -1) @ v


def masked(rearranged: Callable[[Tensor], Tensor]) -> Any:
    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask = rearranged(mask)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    return core


ANGLES = angles(SIZE)

KEPT: dict[str, tuple[dict[str, Any], tuple[Tensor, ...], str]] = {
    "stretched": ({"heads": on_both(stretched)}, ANGLES, "turns heads in an unknown way"),
    "queries alone": (
        {"heads": lambda m, x, *t: (turned(split(m, x)[0], *t), *split(m, x)[1:])},
        ANGLES,
        "normalizes or turns queries and keys differently",
    ),
    "a table of the module": ({"heads": on_both(of_the_module)}, ANGLES, "reads buffer table"),
    "an activation of queries": (
        {"heads": on_queries(lambda m, q: q.relu())},
        (),
        "computes relu, which attention reads",
    ),
    "heads in reverse": (
        {"heads": on_queries(lambda m, q: q.flip(1))},
        (),
        "computes flip, which attention reads",
    ),
    "tokens out of order": (
        {"heads": on_queries(lambda m, q: torch.cat([q[:, :, 1:], q[:, :, :1]], 2))},
        (),
        "attends to other rows than those of tokens",
    ),
    "scaled values": (
        {"heads": lambda m, x: (*split(m, x)[:2], split(m, x)[2] * 2)},
        (),
        "normalizes, turns or scales values",
    ),
    "keys repeated otherwise": (
        {"heads": lambda m, x: (split(m, x)[0], *(t.repeat(1, 2, 1, 1) for t in split(m, x)[1:]))},
        (),
        "repeats its heads in an unknown order",
    ),
    "a part of the heads": (
        {
            "heads": lambda m, x: [t[..., :4] for t in split(m, x)],
            "join": lambda y: F.pad(joined(y), (0, 16)),
        },
        (),
        "computes pad",
    ),
    "earlier keys of another input": (
        {"heads": lambda m, x, y: (split(m, x)[0], *split(m, y)[1:])},
        (stream(),),
        "hides keys of an input",
    ),
    "values of another input": (
        {"heads": lambda m, x, y: (*split(m, x)[:2], split(m, y)[2])},
        (stream(),),
        "joins branches of several inputs",
    ),
    "joined otherwise": (
        {"join": lambda y: y.flatten(2).mT.reshape(y.shape[0], y.shape[2], -1)},
        (),
        "order",
    ),
    "masked by scores": ({"core": products}, (), "in the scores of attention"),
    "tables with gradients": (
        {"heads": on_both(lambda m, *given: turned(*given))},
        tuple(t.clone().requires_grad_() for t in ANGLES),
        "tables that need a gradient",
    ),
    "a transposed mask": ({"core": masked(lambda mask: mask.mT)}, (MASK,), "rearranges its mask"),
    "a mask that is computed": ({"core": masked(torch.exp)}, (MASK,), "computes exp, in the mask"),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_attention_is_a_reason_to_keep_a_module(name: str) -> None:
    parts, others, reason = KEPT[name]
    with pytest.raises(KeptError) as kept:
        read_of(example_of(*others, **parts))
    assert reason in kept.value.reason


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gpt2", "eager")])
@pytest.mark.parametrize(("new", "past", "masked"), [(7, 0, 1), (1, 5, 1), (3, 5, 1), (3, 5, 0)])
def test_a_cache_is_extended_as_by_the_layer(
    family: str, attention: str, new: int, past: int, masked: int
) -> None:
    torch.manual_seed(0)
    model: Any = model_of(family, attention).eval()
    ids = torch.randint(3, 60, (BATCH, past + new))

    def cache() -> Any:
        made = transformers.DynamicCache(config=model.config)
        if past:
            model(ids[:, :past], **{CACHE: made}, use_cache=True)
        return made

    given = {"input_ids": ids[:, past:], "attention_mask": torch.ones(BATCH, past + new)}
    with torch.no_grad():
        module, args, kwargs = layer_of(model, **given, **{CACHE: cache()}, use_cache=True)
        if not masked:
            kwargs = {name: None if "mask" in name else v for name, v in kwargs.items()}
            args = tuple(a if not isinstance(a, Tensor) or a.dim() < 4 else None for a in args)
        example = Example(module, args, kwargs)
        assert_recomputed(example)
        assert example.cache().get_seq_length() == past  # type: ignore[union-attr]

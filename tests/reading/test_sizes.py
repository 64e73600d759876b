"""A trace holds for calls of other sizes where its forward would call the same functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opfuser.reading.call_key import call_key
from opfuser.reading.dataflow import map_leaves
from opfuser.reading.tracer import Trace, trace
from tests.reading.modules import WIDTH, Computes
from tests.reading.test_tracer import llama_call, llama_layer
from tests.reading.tiny import CACHE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def accepts(found: Trace, *args: Any, **kwargs: Any) -> bool:
    """Whether a trace holds for another call of its module."""
    module = found.module
    key = call_key(module, args, kwargs)
    return key.facts == found.key.facts and found.takes(key, module)


@pytest.mark.parametrize("length", [2, 7, 64])
def test_a_llama_layer_has_one_trace_for_all_lengths_but_one(length: int) -> None:
    layer = llama_layer()
    x, rotary = llama_call(5)
    found = trace(layer, (x,), rotary)
    assert found.guards == ("s[1] > 1",)
    x, rotary = llama_call(length)
    assert accepts(found, x, **rotary)
    x, rotary = llama_call(1)
    assert not accepts(found, x, **rotary)


def unrolled(self: Any, x: Tensor) -> Tensor:
    for i in range(x.shape[1]):
        x = x + i
    return x


def split(self: Any, x: Tensor) -> Tensor:
    parts = x.split(3, 1)
    return torch.cat([part * i for i, part in enumerate(parts)], 1)


FORWARDS: dict[str, Callable[..., Tensor]] = {
    "any": lambda self, x: x.view(x.size(0), -1, 2, 4).transpose(1, 2).reshape(x.shape),
    "product": lambda self, x: x.view(x.shape[0] * x.shape[1], WIDTH) + 1,
    "numel": lambda self, x: x.view(x.numel() // WIDTH, WIDTH) + 1,
    "condition": lambda self, x: x * 2 if x.shape[1] > 4 else x + 1,
    "derived condition": lambda self, x: x * 2 if torch.cat([x, x], 1).shape[1] > 16 else x + 1,
    "joined condition": lambda self, x: (
        x * 2 if x.view(x.shape[0] * x.shape[1], WIDTH).shape[0] > 20 else x + 1
    ),
    "joined to a constant": lambda self, x: (
        x * 2 if x.repeat(2, 1, 1).view(x.shape[0] * 2, -1, WIDTH).shape[0] == WIDTH else x + 1
    ),
    "joined by chance": lambda self, x: (
        x * 2
        if x[:, :1].expand(-1, 3, -1).reshape(x.shape[0] * 3, WIDTH).shape[0] == x.shape[1]
        else x + 1
    ),
    "condition of a part": lambda self, x: (
        x * 2 if x.view(*x.shape[:2], 2, -1).permute(2, 0, 1, 3)[0].shape[1] > 5 else x + 1
    ),
    "both": lambda self, x: x + 1 if x.shape[0] < x.shape[1] else x * 2,
    "equal": lambda self, x: x + 1 if x.shape[0] == x.shape[1] else x * 2,
    "odd": lambda self, x: x + 1 if x.shape[1] % 2 else x * 2,
    "minimum": lambda self, x: x[:, : min(x.shape[1], 5)] * 2,
    "slice": lambda self, x: x[:, :6] * 2,
    "slice from the end": lambda self, x: x[:, -6:] * 2,
    "slice of a table": lambda self, x: x + self.positions[: x.shape[1]],
    "scale": lambda self, x: x * x.shape[1],
    "root": lambda self, x: x * x.shape[1] ** -0.5,
    "square root": lambda self, x: x * math.sqrt(x.shape[1]),
    "quotient": lambda self, x: x / (x.shape[1] / 2),
    "literal": lambda self, x: x.view(x.shape[0], -1, 3, WIDTH).flatten(1, 2),
    "literal without effect": lambda self, x: x.reshape(-1, 3, WIDTH) + 1,
    "loop": unrolled,
    "rows": lambda self, x: torch.stack([row * 2 for row in x]),
    "count": lambda self, x: torch.stack([x * 2] * len(x)),
    "dict": lambda self, x: x * {3: 1.0, 6: 2.0}.get(x.shape[1], 3.0),
    "split": split,
    "filled": lambda self, x: x + torch.full((WIDTH,), x.shape[1]),
    "padded": lambda self, x: F.pad(x, (0, 0, 0, 9 - x.shape[1] % 9)),
    "child": lambda self, x: self.parts[1](self.chain[-1](x)),
    "child by a size": lambda self, x: self.parts[x.shape[1] % 2](x),
    "child of a sequence by a size": lambda self, x: self.chain[-1 - x.shape[1] % 2](x),
}
# Forwards whose traces are to hold for other sizes, besides never for wrong ones.
GENERAL = {"any", "product", "numel", "condition", "slice", "condition of a part", "child"}


# Lengths that a forward can take, where that is not any.
FITTING = {"literal": (3, 13, 3), "literal without effect": (3, 13, 3), "slice of a table": (0, 11)}
SHAPES = {"expand", "view", "reshape", "flatten", "transpose", "__getitem__", "split", "unbind"}


def facts(found: Trace) -> list[Any]:
    """Each function of a trace with its constants, or of shapes, whether one is changed."""

    def fact(node: Any) -> Any:
        if node.op in SHAPES:
            return node.op, len(node.results), node.results[0].shape == node.args[0].shape
        return node.op, map_leaves(lambda leaf: getattr(leaf, "origin", leaf), node.args)

    return [fact(node) for node in found.dataflow.nodes]


def agree(found: Trace, other: Trace) -> bool:
    """Whether two traces call the same functions; what changes no shape in the first never does."""
    mine, theirs = facts(found), facts(other)
    return len(mine) == len(theirs) and all(
        a == b or (a[0] in SHAPES and a[:2] == b[:2] and not a[2]) for a, b in zip(mine, theirs)
    )


@pytest.mark.parametrize("name", FORWARDS)
def test_a_trace_is_accepted_only_where_another_trace_is_equal(name: str) -> None:
    module = Computes(FORWARDS[name])
    module.positions = torch.randn(10, WIDTH)
    module.parts = nn.ModuleList([nn.ReLU(), nn.Tanh()])
    module.chain = nn.Sequential(nn.ReLU(), nn.Tanh())
    inputs = [torch.randn(b, s, WIDTH) for b in (2, 4, 5, 7) for s in (3, 5, 6, 9, 12)]
    traces: list[tuple[Trace, Tensor]] = []
    for x in inputs:
        if x.shape[1] in range(*FITTING.get(name, (0, 99))):
            traces.append((trace(module, (x,), {}), x))
    elsewhere = 0
    for found, of in traces:
        for other, x in traces:
            if accepts(found, x):
                elsewhere += x is not of
                assert agree(found, other), (of.shape, x.shape)
    assert elsewhere or name not in GENERAL


def test_sizes_of_parameters_and_equal_sizes_are_part_of_the_key() -> None:
    module = Computes(lambda self, x, y: x + y)
    found = trace(module, (torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)), {})
    assert accepts(found, torch.randn(4, 6, WIDTH), torch.randn(4, 6, WIDTH))
    assert not accepts(found, torch.randn(4, 6, WIDTH), torch.randn(4, 1, WIDTH))
    assert not accepts(found, torch.randn(4, 4, WIDTH), torch.randn(4, 4, WIDTH))
    assert not accepts(found, torch.randn(WIDTH, 6, WIDTH), torch.randn(WIDTH, 6, WIDTH))


OTHERS: dict[str, Callable[[Computes, Tensor], tuple[Any, ...]]] = {
    "dtype": lambda m, x: (x.double(),),
    "rank": lambda m, x: (x[0],),
    "device": lambda m, x: (x.to("meta"),),
    "gradient": lambda m, x: (x.clone().requires_grad_(),),
    "another argument": lambda m, x: (x, None),
    "training": lambda m, x: (m.eval() and x,),
}


@pytest.mark.parametrize("name", OTHERS)
def test_calls_of_another_kind_have_another_key(name: str) -> None:
    module = Computes(lambda self, x, y=None: x + 1)
    x = torch.randn(3, 5, WIDTH)
    found = trace(module, (x,), {})
    assert accepts(found, x)
    assert not accepts(found, *OTHERS[name](module, x))


def test_modes_are_part_of_the_key() -> None:
    module = Computes(lambda self, x: x + 1)
    x = torch.randn(3, 5, WIDTH)
    found = trace(module, (x,), {})
    with torch.no_grad():
        assert not accepts(found, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not accepts(found, x)


def test_equal_arguments_and_one_twice_are_different_calls() -> None:
    module = Computes(lambda self, x, y: x + y)
    x, y = torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)
    assert not accepts(trace(module, (x, y), {}), x, x)


def test_a_scalar_of_another_value_or_type_is_another_call() -> None:
    module = Computes(lambda self, x, factor: x * factor)
    x = torch.randn(3, 5, WIDTH)
    found = trace(module, (x, 1), {})
    assert not accepts(found, x, 2)
    assert not accepts(found, x, True)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_length_of_a_cache_is_a_size_of_the_call(implementation: str) -> None:
    layer = llama_layer(implementation).eval()

    def call(batch: int, queries: int, cached: int) -> Any:
        cache = transformers.DynamicCache()
        if cached:
            cache.update(*torch.randn(2, batch, 2, cached, 8), 0)
        x, tables = torch.randn(batch, queries, 32), torch.randn(2, batch, queries, 8)
        return x, {CACHE: cache, "position_embeddings": tuple(tables)}

    lengths = (3, 1, 0), (3, 1, 4), (5, 1, 9), (3, 5, 0), (5, 6, 0), (3, 5, 4), (3, 6, 7), (5, 9, 4)
    calls = [call(*sizes) for sizes in lengths]
    traces = [trace(layer, (x,), kwargs) for x, kwargs in calls]
    accepted = set()
    for of, found in zip(lengths, traces):
        for sizes, (x, kwargs), other in zip(lengths, calls, traces):
            if accepts(found, x, **kwargs):
                accepted.add((of, sizes))
                assert agree(found, other)
    assert {((3, 1, 4), (5, 1, 9)), ((3, 6, 7), (5, 9, 4))} <= accepted


def test_a_sibling_is_asked_for_its_own_length() -> None:
    layer, sibling = llama_layer(), llama_layer(index=1)
    cache = transformers.DynamicCache()
    x, rotary = llama_call()
    found = trace(layer, (x,), {CACHE: cache, **rotary})
    cache.update(torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4, 8), 0)
    key = call_key(layer, (x,), {CACHE: cache, **rotary})
    assert not found.takes(key, layer)
    assert found.takes(key, sibling)

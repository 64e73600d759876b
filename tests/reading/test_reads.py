"""What a forward has read is noticed when it changes, and shared by siblings that read the same."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opfuser.reading.siblings import sibling_reads
from opfuser.reading.tracer import Trace, trace
from tests.reading.modules import WIDTH, Computes, given
from tests.reading.test_tracer import llama_call, llama_layer
from tests.reading.tiny import CACHE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
llama = transformers.models.llama.modeling_llama
factor = 2.0


def trace_of(layer: nn.Module) -> Trace:
    x, rotary = llama_call()
    return trace(layer, (x,), rotary)


# Others, and what becomes of them, are in tests/applying/test_adversities.py.
CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "implementation": lambda m, p: setattr(m.self_attn.config, "_attn_implementation", "eager"),
    "dropout": lambda m, p: m.self_attn.train(not m.self_attn.training),
    "activation": lambda m, p: setattr(m.mlp, "act_fn", nn.ReLU()),
    "bias": lambda m, p: setattr(m.mlp.up_proj, "bias", nn.Parameter(torch.zeros(48))),
    "weight": lambda m, p: setattr(m.mlp.up_proj, "weight", nn.Parameter(torch.zeros(48, 32))),
    "dtype": lambda m, p: m.post_attention_layernorm.double(),
    "own forward's class": lambda m, p: p.setattr(type(m), "forward", lambda self, x: x),
    "attribute of a class": lambda m, p: p.setattr(type(m), "gradient_checkpointing", True),
    "attribute instead": lambda m, p: setattr(m, "gradient_checkpointing", True),
    "torch's function": lambda m, p: p.setattr(F, "scaled_dot_product_attention", lambda q, *_: q),
    "registry": lambda m, p: p.setitem(
        type(llama.ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", lambda *_: None
    ),
    "local registry": lambda m, p: p.setitem(
        llama.ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", lambda *_: None
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_a_llama_layer_reads_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = llama_layer()
    found = trace_of(layer)
    assert found.reads.current()
    CHANGES[name](layer, monkeypatch)
    assert not found.reads.current()


def trained(layer: Any, patch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(1.0)


def test_another_multi_head_attention_of_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16)
    found = trace(layer, (given(),), {})
    assert found.reads.current()
    monkeypatch.setattr(
        F, "multi_head_attention_forward", lambda query, *_, **options: (query, None)
    )
    assert not found.reads.current()


INDIFFERENT: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "values": trained,
    "loaded": lambda m, p: m.load_state_dict(m.state_dict()),
    "frozen": lambda m, p: m.requires_grad_(False),
    "configuration": lambda m, p: setattr(m.self_attn.config, "use_cache", False),
    "attribute": lambda m, p: setattr(m.mlp, "note", "that nobody reads"),
    "own hook": lambda m, p: m.register_forward_hook(lambda *_: None),
    "own forward": lambda m, p: setattr(m, "forward", lambda x: x),
    "other registry": lambda m, p: p.setitem(
        type(llama.ALL_ATTENTION_FUNCTIONS)._global_mapping, "eager", lambda *_: None
    ),
}


@pytest.mark.parametrize("name", INDIFFERENT)
def test_a_change_of_what_it_does_not_read_is_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = llama_layer()
    found = trace_of(layer)
    INDIFFERENT[name](layer, monkeypatch)
    assert found.reads.current()


def scaled(settings: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, x: x * settings["scale"]


def loops(self: Any, x: Tensor) -> Tensor:
    for child in self.children():
        x = child(x)
    return x


class Config:
    def __init__(self) -> None:
        self.scale = 2.0
        self.inner = types.SimpleNamespace(shift=1.0)


def configured(config: Config) -> Computes:
    module = Computes(lambda self, x: x * self.config.scale + self.config.inner.shift)
    module.config = config  # type: ignore[assignment]
    return module


def with_list(factors: list[float]) -> Computes:
    module = Computes(lambda self, x: x * self.factors[0])
    module.factors = factors  # type: ignore[assignment]
    return module


def with_partial() -> Computes:
    module = Computes(lambda self, x: self.activation(x))
    module.activation = functools.partial(F.gelu, approximate="tanh")  # type: ignore[assignment]
    return module


class Makers(OrderedDict[str, Any]):
    """Makes what it is asked for, as the activations of transformers do."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


makers = Makers(relu=nn.ReLU, other=lambda: pytest.fail("was asked for"))
OWN: dict[str, tuple[Callable[[], Computes], Callable[[Any, pytest.MonkeyPatch], Any]]] = {
    "list": (lambda: with_list([2.0]), lambda m, p: m.factors.append(1.0)),
    "entry of a list": (lambda: with_list([2.0]), lambda m, p: m.factors.__setitem__(0, 3.0)),
    "object": (lambda: configured(Config()), lambda m, p: setattr(m.config, "scale", 3.0)),
    "nested object": (
        lambda: configured(Config()),
        lambda m, p: setattr(m.config.inner, "shift", 3.0),
    ),
    "closure": (
        lambda: Computes(scaled({"scale": 2.0})),
        lambda m, p: m.function.__closure__[0].cell_contents.update(scale=3.0),
    ),
    "cell": (
        lambda: Computes(scaled({"scale": 2.0})),
        lambda m, p: setattr(m.function.__closure__[0], "cell_contents", {"scale": 3.0}),
    ),
    "partial": (with_partial, lambda m, p: m.activation.keywords.update(approximate="none")),
    "global": (
        lambda: Computes(lambda self, x: x * factor),
        lambda m, p: p.setattr(sys.modules[__name__], "factor", 3.0),
    ),
    "a container of a class of its own": (
        lambda: Computes(lambda self, x: makers["relu"](x)),
        lambda m, p: p.setitem(makers, "other", nn.PReLU),
    ),
    "buffer": (
        lambda: Computes(lambda self, x: x + self.table),
        lambda m, p: setattr(m, "table", torch.ones(WIDTH)),
    ),
    "absent attribute": (
        lambda: Computes(lambda self, x: x * getattr(self, "scale", 1.0)),
        lambda m, p: setattr(m, "scale", 2.0),
    ),
    "absent child": (
        lambda: Computes(lambda self, x: self.extra(x) if hasattr(self, "extra") else x + 1),
        lambda m, p: m.add_module("extra", nn.Linear(WIDTH, WIDTH)),
    ),
    "another child": (
        lambda: Computes(loops),
        lambda m, p: m.add_module("extra", nn.Linear(WIDTH, WIDTH)),
    ),
    "attributes": (
        lambda: Computes(lambda self, x: x * vars(self).get("scale", 1.0)),
        lambda m, p: setattr(m, "scale", 2.0),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_change_inside_of_what_was_read_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, change = OWN[name]
    module = make()
    found = trace(module, (given(),), {})
    assert not any(node.effect for node in found.dataflow.nodes)
    assert found.reads.current()
    change(module, monkeypatch)
    assert not found.reads.current()


def test_a_module_that_the_forward_makes_is_not_read() -> None:
    found = trace(Computes(lambda self, x: nn.Softmax(dim=-1)(x)), (given(),), {})
    assert [node.op for node in found.dataflow.nodes] == ["softmax"]
    assert all(not isinstance(m, nn.Softmax) for m in found.reads.facts[type][0])
    assert found.reads.current()


class Early(nn.Module):
    def __init__(self) -> None:
        self.count = 1
        super().__init__()


def test_a_module_may_have_attributes_before_it_is_one() -> None:
    found = trace(Computes(lambda self, x: x * Early().count), (given(),), {})
    assert found.dataflow.nodes[0].effect == "sets its attribute 'count'"


def test_a_check_of_a_llama_layer_makes_few_calls_of_python() -> None:
    reads = trace_of(llama_layer()).reads
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        reads.current()
    finally:
        sys.setprofile(None)
    assert calls.count("call") == 1


# Siblings


@pytest.fixture
def layers() -> tuple[Any, Any]:
    first = llama_layer()
    second = llama.LlamaDecoderLayer(first.self_attn.config, 1)
    return first, second


def test_a_sibling_reads_the_same_of_its_own(layers: tuple[Any, Any]) -> None:
    first, second = layers
    reads = trace_of(first).reads
    own = sibling_reads(reads, second)
    assert own is not None
    assert own.current()
    second.mlp.act_fn = nn.ReLU()
    assert not own.current()
    assert reads.current()


DIFFERENT: dict[str, Callable[[Any, Any], Any]] = {
    "activation": lambda m, _: setattr(m.mlp, "act_fn", nn.ReLU()),
    "epsilon": lambda m, _: setattr(m.input_layernorm, "variance_epsilon", 1e-3),
    "scale": lambda m, _: setattr(m.self_attn, "scaling", 0.5),
    "training": lambda m, _: m.self_attn.train(not m.self_attn.training),
    "shape": lambda m, _: setattr(m.mlp, "down_proj", nn.Linear(48, 32, bias=True)),
    "dtype": lambda m, _: m.mlp.double(),
    "frozen": lambda m, _: m.mlp.requires_grad_(False),
    "tied": lambda m, _: setattr(m.mlp.up_proj, "weight", m.mlp.gate_proj.weight),
    "hook": lambda m, _: m.mlp.register_forward_hook(lambda *_: None),
    "forward": lambda m, _: setattr(m.mlp, "forward", lambda x: x),
    "configuration": lambda m, _: setattr(m.self_attn, "config", transformers.LlamaConfig()),
    "changed since": lambda _, first: setattr(first.self_attn, "scaling", 0.5),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_module_that_reads_something_else_is_no_sibling(
    name: str, layers: tuple[Any, Any]
) -> None:
    first, second = layers
    reads = trace_of(first).reads
    DIFFERENT[name](second, first)
    assert sibling_reads(reads, second) is None


@pytest.mark.parametrize("make", [with_partial, lambda: configured(Config())])
def test_equal_contents_make_siblings(make: Callable[[], Computes]) -> None:
    first, second = make(), make()
    second.function = first.function
    own = sibling_reads(trace(first, (given(),), {}).reads, second)
    assert own is not None
    if hasattr(second, "config"):
        second.config.inner.shift = 3.0
    else:
        second.activation.keywords.update(approximate="none")
    assert not own.current()


def test_the_number_of_a_layer_may_differ_where_a_cache_alone_is_told_of_it(
    layers: tuple[Any, Any],
) -> None:
    first, second = layers
    x, rotary = llama_call()
    given_cache = {CACHE: transformers.DynamicCache(), **rotary}
    reads = trace(first, (x,), given_cache).reads
    assert sibling_reads(reads, second) is not None
    first.self_attn.layer_idx = 2
    assert not reads.current()


def test_the_number_of_a_layer_may_not_differ_where_it_is_used() -> None:
    def forward(self: Any, x: Tensor, cache: Any) -> Any:
        y = x if ["even", "odd"][self.layer_idx] == "even" else -x
        keys, _ = cache.update(x[:, None], x[:, None], self.layer_idx)
        return y + keys[:, 0, -5:]

    first, second = Computes(forward), Computes(forward)
    first.layer_idx, second.layer_idx = 0, 1  # type: ignore[assignment]
    reads = trace(first, (given(), transformers.DynamicCache()), {}).reads
    assert sibling_reads(reads, second) is None

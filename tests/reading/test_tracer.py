"""A trace has every operation of a forward, says what else it does, and leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import io
import os
import random
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser.reading.kept import KeptError, NotNowError
from opfuser.reading.observed import Observed
from opfuser.reading.tracer import trace
from tests.reading.modules import WIDTH, Computes, effects, given, ops, recomputed, traced
from tests.reading.tiny import CACHE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "num_hidden_layers": 2,
}
written: list[Any] = []


@functools.lru_cache
def ones() -> Tensor:
    return torch.ones(WIDTH)


counted = 0


def llama_layer(implementation: str = "sdpa", index: int = 0) -> Any:
    config = transformers.LlamaConfig(num_key_value_heads=2, **SIZES)
    config._attn_implementation = implementation
    return transformers.models.llama.modeling_llama.LlamaDecoderLayer(config, index)


def llama_call(length: int = 5) -> tuple[Tensor, dict[str, Any]]:
    return torch.randn(3, length, 32), {"position_embeddings": (torch.randn(3, length, 8),) * 2}


# Operations


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_recomputed_dataflow_of_a_llama_layer_is_its_forward(
    implementation: str, training: bool
) -> None:
    layer = llama_layer(implementation).train(training)
    x, rotary = llama_call()
    found = trace(layer, (x,), rotary)
    assert not effects(found)
    got = recomputed(found.dataflow, x, rotary["position_embeddings"][0])
    assert torch.equal(got, layer(x, **rotary))


def test_an_encoder_layer_of_torch_is_traced_in_its_slow_form() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True).eval()
    x = given()
    found = trace(layer, (x,), {})
    assert "scaled_dot_product_attention" in ops(found)
    torch.testing.assert_close(recomputed(found.dataflow, x), layer(x))


def test_nodes_know_their_place_and_calls_their_nodes() -> None:
    found = traced(lambda self, x: F.silu(self.inner(x)))
    assert [(n.op, n.place) for n in found.dataflow.nodes] == [("linear", "inner"), ("silu", "")]
    (call,) = found.dataflow.calls
    assert (call.path, call.start, call.end) == ("inner", 0, 1)
    assert call.args == tuple(found.dataflow.inputs)
    assert call.result is found.dataflow.nodes[0].results[0]


def test_functions_that_compute_nothing_are_no_nodes() -> None:
    found = traced(lambda self, x: F.dropout(x.float().contiguous(), 0.5, training=False))
    assert ops(found) == []
    assert found.dataflow.result is found.dataflow.inputs[0]


def test_a_tensor_that_is_given_twice_is_one_input() -> None:
    x = given()
    found = traced(lambda self, a, b: a + b, x, x)
    assert len(found.dataflow.inputs) == 1


def test_a_function_of_another_package_has_no_name_of_torchs() -> None:
    found = traced(lambda self, x: torch.ops.aten.silu(x) + torch.ops.aten.silu.default(x))
    assert all("::" in op for op in ops(found)[:2])


def test_shared_and_parametrized_parameters_are_values_of_their_paths() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    module[1].weight = module[0].weight
    parametrizations.weight_norm(module[0])
    found = trace(module, (given(),), {})
    linears = [node for node in found.dataflow.nodes if node.op == "linear"]
    assert [node.args[1].origin for node in linears] == ["node", "parameter"]
    assert linears[1].args[1].name == "1.weight"


def test_casts_have_the_dtypes_that_the_forward_has() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x + F.layer_norm(x.float(), (WIDTH,)).to(x.dtype)

    found = traced(forward, given().bfloat16())
    dtypes = [node.results[0].meta.dtype for node in found.dataflow.nodes]
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_autocast_gives_the_dtypes_of_the_device(implementation: str) -> None:
    layer = llama_layer(implementation)
    x, rotary = llama_call()
    with torch.autocast("cpu", torch.bfloat16):
        found = trace(layer, (x,), rotary)
        real = dict(zip(found.dataflow.inputs, (x, *rotary["position_embeddings"])))
        got = recomputed(found.dataflow, *real.values())
        want = layer(x, **rotary)
    assert not effects(found)
    assert {n.results[0].meta.dtype for n in found.dataflow.nodes if n.op == "linear"} == {
        torch.bfloat16
    }
    assert found.dataflow.result.meta.dtype == want.dtype == got.dtype


def test_a_module_on_the_meta_device_is_traced() -> None:
    x, rotary = llama_call()
    found = trace(llama_layer(), (x,), rotary)
    tables = tuple(t.to("meta") for t in rotary["position_embeddings"])
    again = trace(llama_layer().to("meta"), (x.to("meta"),), {"position_embeddings": tables})
    assert ops(again) == ops(found)


# What a forward does besides


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.saved_tensors[0], None


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.inner(x)
    return x + y


def with_saved_hooks(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return self.inner(x)  # type: ignore[no-any-return]


def in_other_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.inner(x)  # type: ignore[no-any-return]


def deletes_attribute(self: Any, x: Tensor) -> Tensor:
    del self.inner.bias
    return x + 1


def counts(self: Any, x: Tensor) -> Tensor:
    global counted  # noqa: PLW0603
    counted = 7
    return x + 1


generator = random.Random(0)
turned = deque([1.0, 2.0])
log = io.StringIO()
numbers = iter([1.0, 2.0])
nested = [[[[[[[[1.0]]]]]]]]


def counts_in_a_parameter(self: Any, x: Tensor) -> Tensor:
    self.inner.weight.calls += 1
    return x + self.inner.weight.calls


def counts_in_its_class(self: Any, x: Tensor) -> Tensor:
    type(self).calls += 1
    return x + type(self).calls


def counts_in_a_function(self: Any, x: Tensor) -> Tensor:
    counted_by.calls += 1  # type: ignore[attr-defined]
    return x + counted_by()


def counted_by() -> int:
    return counted_by.calls  # type: ignore[attr-defined, no-any-return]


counted_by.calls = 0  # type: ignore[attr-defined]


def counter() -> tuple[Callable[..., Tensor], Callable[[], object]]:
    """A function that counts its calls in variables of its own, and what these are."""
    calls, several, default = 0, [0], []

    def count(self: Any, x: Tensor, seen: list[Any] = default) -> Tensor:
        nonlocal calls
        calls += 1
        several[0] += 1
        seen.append(x)
        return x + calls

    return count, lambda: (calls, list(several), list(default))


counts_in_variables, variables = counter()


class Tally:
    calls = 0


def counts_in_another_class(self: Any, x: Tensor) -> Tensor:
    Tally.calls += 1
    return x + Tally.calls


def counting(self: Any, x: Tensor) -> Tensor:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    count()
    return x + calls


EFFECTS: dict[str, tuple[Callable[..., Any], str]] = {
    "in place": (lambda self, x: (x * 2).add_(1), "writes in place by add_"),
    "entry": (lambda self, x: x.__setitem__(0, 1.0), "writes in place by __setitem__"),
    "activation": (lambda self, x: F.relu(x, inplace=True), "writes in place by relu"),
    "out": (
        lambda self, x: torch.add(x, 1, out=self.table[None, None] + x),
        "writes in place by add",
    ),
    "data": (lambda self, x: setattr(x, "data", x + 1), "writes in place by data.__set__"),
    "random": (lambda self, x: x + torch.rand(5, 1), "draws random numbers by rand"),
    "noise": (lambda self, x: x + torch.randn_like(x), "draws random numbers by randn_like"),
    "no_grad": (without_gradients, "computes linear with gradients switched"),
    "autocast": (in_other_autocast, "computes linear with autocast switched"),
    "function": (lambda self, x: Doubled.apply(x), "has an autograd function, Doubled"),
    "function twice": (
        lambda self, x: self.inner(x) + Doubled.apply(Doubled.apply(x)),
        "has an autograd function, Doubled",
    ),
    "function in C": (
        lambda self, x: functools.partial(Doubled.apply, x)(),
        "has an autograd function, Doubled",
    ),
    "function with its context apart": (
        lambda self, x: next(map(Tripled.apply, [x])),
        "has an autograd function, Tripled",
    ),
    "saved": (with_saved_hooks, "has saved hooks"),
    "checkpoint": (
        lambda self, x: checkpoint(self.inner, x, use_reentrant=False),
        "is checkpointed",
    ),
    "pointer": (lambda self, x: x + x.data_ptr(), "calls data_ptr"),
    "requires_grad": (lambda self, x: x.requires_grad_(), "writes in place by requires_grad_"),
    "closure": (counting, "writes to a variable of another function"),
    "strides": (lambda self, x: x + x.stride(0), "asks for stride"),
    "graph": (lambda self, x: (x * 2).is_leaf and x, "asks for is_leaf"),
    "attribute": (lambda self, x: setattr(self, "last", x) or x + 1, "sets its attribute 'last'"),
    "attribute that it reads": (
        lambda self, x: setattr(self, "last", x) or x + self.last,
        "sets its attribute 'last'",
    ),
    "attribute of its dict that it reads": (
        lambda self, x: self.__dict__.update(last=x) or x + self.last,
        "writes to attributes",
    ),
    "deleted": (deletes_attribute, "writes to attributes"),
    "dict": (lambda self, x: self.__dict__.update(last=x) or x + 1, "writes to attributes"),
    "memo": (lambda self, x: x + ones(), "fills a cache"),
    "list": (lambda self, x: written.append(x) or x + 1, "writes to a list"),
    "global": (counts, "writes to a global"),
    "python's random": (lambda self, x: x + random.random(), "draws random numbers"),
    "a generator's random": (lambda self, x: x + generator.random(), "draws random numbers"),
    "parameter": (counts_in_a_parameter, "writes to attributes"),
    "class": (counts_in_its_class, "writes to 'calls' of a class"),
    "attribute of a function": (counts_in_a_function, "writes to attributes"),
    "variables": (counts_in_variables, "writes to a variable of another function"),
    "another class": (counts_in_another_class, "writes to 'calls' of a class"),
    "new attribute of a function": (
        lambda self, x: setattr(variables, "calls", 1) or x + 1,
        "writes to attributes",
    ),
    "new attribute of a parameter": (
        lambda self, x: setattr(self.inner.bias, "seen", True) or x + 1,
        "writes to attributes",
    ),
    "list in attributes": (
        lambda self, x: self.__dict__.setdefault("lists", [written])[0].append(x) or x + 1,
        "writes to a list",
    ),
    "hidden attribute": (
        lambda self, x: x + object.__getattribute__(self, "calls"),
        "reads by object.__getattribute__",
    ),
    "seed": (lambda self, x: torch.manual_seed(3) and x, "draws random numbers"),
    "time": (lambda self, x: x + time.time(), "asks for time"),
    "noise of the system": (lambda self, x: x + os.urandom(1)[0], "asks for urandom"),
}


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """All that a trace replaces for its time, before and after a test."""

    written.clear()

    def state() -> tuple[Any, ...]:
        config = transformers.PreTrainedConfig
        return (
            dict(vars(nn.Module)),
            config.__getattribute__,
            sys.getprofile(),
            torch.is_grad_enabled(),
            torch.overrides._get_current_function_mode_stack(),
            random.getstate(),
            generator.getstate(),
            list(turned),
            copy.copy(numbers).__reduce__()[2:],
            counted_by.calls,  # type: ignore[attr-defined]
            Computes.calls,
            Tally.calls,
            variables(),
            dict(vars(variables)),
            log.getvalue(),
            torch.get_rng_state().tolist(),
            str(np.random.get_state()),
            list(written),
            ones.cache_info().currsize,
            counted,
        )

    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.usefixtures("nothing_left_behind")
def test_what_a_forward_does_besides_is_an_effect_and_is_undone(name: str) -> None:
    function, text = EFFECTS[name]
    with torch.random.fork_rng():
        module = Computes(function)
        x = given()
    before = x.clone(), module.table.clone(), dict(module.__dict__), dict(module.inner._parameters)
    found = trace(module, (x,), {})
    assert text in [effect for effect, _ in effects(found)]
    assert torch.equal(x, before[0])
    assert torch.equal(module.table, before[1])
    assert module.__dict__ == before[2]
    assert module.inner._parameters.keys() == before[3].keys()
    assert not vars(module.inner.bias)


@pytest.mark.parametrize("name", ["random", "no_grad", "attribute", "function"])
def test_an_effect_in_a_child_is_among_the_nodes_of_its_call(name: str) -> None:
    function, text = EFFECTS[name]
    outer = Computes(lambda self, x: self.inner(x * 2) + 1)
    outer.inner = Computes(function)
    found = trace(outer, (given(),), {})
    call = found.dataflow.calls[0]
    where = [i for i, node in enumerate(found.dataflow.nodes) if text in node.effect]
    assert where
    assert all(call.start <= i < call.end for i in where)


def test_a_child_that_writes_to_its_argument_is_an_effect_of_its_parent() -> None:
    outer = Computes(lambda self, x: self.inner(y := x * 2) + y)
    outer.inner = Computes(lambda self, x: x.view(-1).add_(1).view(x.shape))
    found = trace(outer, (given(),), {})
    assert ("has 'inner' write to its arguments", "") in effects(found)


def test_gradients_that_are_off_anyway_are_no_effect() -> None:
    with torch.no_grad():
        assert not effects(traced(without_gradients))


def test_a_tensor_that_nobody_was_seen_to_make_is_an_effect() -> None:
    class Foreign(Tensor):
        pass

    hidden: Any = types.ModuleType("hidden")
    hidden.table = torch.ones(WIDTH)
    of_unknown_origin = traced(lambda self, x: x + hidden.table)
    assert ("computes with a tensor of unknown origin", "") in effects(of_unknown_origin)
    module = Computes(lambda self, x: x + self.table)
    module.table = torch.ones(WIDTH).as_subclass(Foreign)
    assert effects(trace(module, (given(),), {})) == [("computes with a Foreign", "")]


def test_a_child_with_hooks_is_one_node_and_its_hooks_are_not_called() -> None:
    module = Computes(lambda self, x: x + self.inner(x * 2))
    module.inner.register_forward_hook(lambda *_: pytest.fail("was called"))
    found = trace(module, (given(),), {})
    assert ops(found) == ["mul", "call_module", "add"]
    assert found.dataflow.nodes[1].function is module.inner
    assert found.dataflow.nodes[2].args[1].node is found.dataflow.nodes[1]


def test_ignored_hooks_are_neither_called_nor_a_reason() -> None:
    module = Computes(lambda self, x: self.inner(x))
    module.inner.register_forward_hook(hook := lambda *_: pytest.fail("was called"))
    found = trace(module, (given(),), {}, ignored_hooks=lambda h: h is hook)
    assert ops(found) == ["linear"]


# What is kept


def swallows(self: Any, x: Tensor) -> Tensor:
    try:
        return x * bool(x.sum() > 0)
    except Exception:  # noqa: BLE001
        return x


KEPT: dict[str, tuple[Callable[..., Any], str]] = {
    "numpy's random": (lambda self, x: x + float(np.random.rand()), ", a RandomState"),
    "queue": (lambda self, x: x + turned.popleft(), "reads 'turned', a deque"),
    "iterator": (lambda self, x: x + next(numbers), "reads 'numbers', a list_iterator"),
    "nested list": (
        lambda self, x: x + nested[0][0][0][0][0][0][0][0],
        "reads 'nested', a nested list",
    ),
    "tensor hook": (
        lambda self, x: self.inner(x).register_hook(print) and x,
        "computes register_hook in ''",
    ),
    "file": (lambda self, x: log.write("called") and x, "calls write of a file"),
    "item": (lambda self, x: x * x.sum().item(), "computes item in ''"),
    "condition": (lambda self, x: x if x.sum() > 0 else -x, "computes __bool__ in ''"),
    "swallowed": (swallows, "computes __bool__ in ''"),
    "another device": (lambda self, x: x.to("cuda"), "has tensors on cpu and on cuda"),
    "made elsewhere": (
        lambda self, x: x + torch.ones(WIDTH, device="cuda"),
        "has tensors on cpu and on cuda",
    ),
    "sparse": (
        lambda self, x: x @ self.sparse,
        "has tensors that are sparse, nested or quantized",
    ),
    "error": (lambda self, x: x + self.missing, "could not be traced: AttributeError"),
    "result": (lambda self, x: {x}, "returns a set"),
    "nested": (
        lambda self, x: trace(self.inner, (x,), {}) and x,
        "is traced while another trace is under way",
    ),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_forward_that_cannot_be_traced_is_kept_with_a_reason(name: str) -> None:
    function, text = KEPT[name]
    with torch.random.fork_rng():
        module, x = Computes(function), given()
    module.sparse = torch.eye(WIDTH).to_sparse()
    with pytest.raises(KeptError) as error:
        trace(module, (x,), {})
    assert text in error.value.reason


def test_a_module_on_two_devices_is_kept() -> None:
    module = Computes(lambda self, x: self.inner(x) + self.table)
    module.table = module.table.to("meta")
    with pytest.raises(KeptError, match="has tensors on cpu and on meta"):
        trace(module, (given(),), {})


def test_an_argument_whose_contents_are_not_known_keeps_the_module() -> None:
    with pytest.raises(KeptError, match="is given a set"):
        traced(lambda self, x, y: x, given(), {1})


def test_a_list_among_the_arguments_is_not_appended_to() -> None:
    seen: list[Tensor] = []
    found = traced(lambda self, x, into: into.append(x) or x, given(), seen)
    assert effects(found) == [("writes to a list", "")]
    assert seen == []


class Counted(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_is_around_a_call_is_told_of_no_trace() -> None:
    module = Computes(lambda self, x: Scaled.apply(x, self.inner.bias))
    x = given()
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with Counted() as counted, hooks:
        trace(module, (x,), {})
    assert counted.count == 0
    assert saved == []


def test_hooks_on_all_modules_keep_it_for_the_time() -> None:
    module = Computes(lambda self, x: self.inner(x))
    found = trace(module, (given(),), {})
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not found.reads.current()
        with pytest.raises(NotNowError, match="is called while all modules have hooks"):
            trace(module, (given(),), {})
    finally:
        handle.remove()
    assert found.reads.current()


def test_a_transform_of_torch_func_keeps_the_module() -> None:
    module = Computes(lambda self, x: self.inner(x))

    def traces(x: Tensor) -> Tensor:
        trace(module, (x,), {})
        return x

    with pytest.raises(NotNowError, match=r"is called under a transform of torch\.func"):
        torch.vmap(traces)(given())


def test_a_device_may_be_named_by_a_string() -> None:
    found = traced(lambda self, x: x.to("cpu") + torch.ones(WIDTH, device="cpu"))
    assert ops(found) == ["ones", "add"]


def test_parameters_that_are_not_initialized_keep_the_module_for_the_time() -> None:
    with pytest.raises(NotNowError, match="has parameters that are not initialized"):
        trace(nn.LazyLinear(WIDTH), (given(),), {})


# Caches, threads, distributed tensors


def test_a_cache_is_not_written_to_and_its_update_is_one_node() -> None:
    cache = transformers.DynamicCache()
    layer = llama_layer("eager").eval()
    x, rotary = llama_call()
    with torch.no_grad():
        layer(x, **{CACHE: cache}, **rotary)
        before = [layer.keys.clone() for layer in cache.layers]
        x, rotary = llama_call(1)
        mask = torch.zeros(3, 1, 1, 6)
        found = trace(layer, (x, mask), {CACHE: cache, **rotary})
    assert all(map(torch.equal, before, (layer.keys for layer in cache.layers)))
    (update,) = (node for node in found.dataflow.nodes if node.op == "cache.update")
    assert update.kwargs == {"layer": 0}
    assert [value.shape for value in update.results] == [(3, 2, 6, 8)] * 2
    assert effects(found) == [("updates a cache", "self_attn")]


def test_what_else_is_read_of_a_cache_keeps_the_module() -> None:
    with pytest.raises(KeptError, match="reads 'get_seq_length' of its cache"):
        traced(lambda self, x, c: x + c.get_seq_length(), given(), transformers.DynamicCache())


def test_other_threads_are_not_recorded_and_wait_with_their_own_traces() -> None:
    other, y = nn.Linear(WIDTH, WIDTH), given()
    found: list[Any] = []
    shared: Any = types.ModuleType("shared")  # into which a trace does not look

    class Starting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: shared.note(other(y)))
            thread.start()
            thread.join()
            shared.waiting.start()
            shared.waiting.join(0.05)
            shared.note(shared.waiting.is_alive())
            return x + 1

    shared.note = found.append
    shared.waiting = threading.Thread(target=lambda: found.append(trace(other, (y,), {})))
    mine = trace(Starting(), (given(),), {})
    shared.waiting.join()
    assert [op for op in ops(mine) if op != "effect"] == ["add"]  # effects are the variables
    assert other not in mine.reads.facts[type][0]
    assert found[0].device.type == "cpu"
    assert found[1]
    assert ops(found[2]) == ["linear"]


def test_what_another_trace_sets_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: Any = types.ModuleType("shared")
    shared.sleep, reads = time.sleep, Observed.reads

    class Setting(nn.Module):
        scale = 1

        def forward(self, x: Tensor) -> Tensor:
            self.scale = 2
            shared.sleep(0.5)
            return x * self.scale

    setting = Setting()
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(trace(setting, (given(),), {})))

    def reads_later(observed: Observed) -> Any:
        if threading.current_thread() is not other:
            other.start()
            time.sleep(0.2)  # the other trace begins, or waits for this one
        return reads(observed)

    monkeypatch.setattr(Observed, "reads", reads_later)
    mine = trace(Computes(lambda self, x: x * setting.scale), (given(),), {})
    other.join()
    assert found
    assert mine.reads.current()


def draws() -> tuple[float, float]:
    return random.random(), float(torch.rand(()))


def test_other_threads_see_nothing_of_a_trace() -> None:
    found: list[Any] = []
    methods = "__call__", "__getattribute__", "__getattr__", "__setattr__"

    def look() -> None:
        drawn = draws()
        seq = opfuser.Sequential(opfuser.Linear(WIDTH, WIDTH), opfuser.GELU(), nn.Identity())
        found.append([getattr(nn.Module, name) for name in methods])
        found.append(seq.plan(given().requires_grad_()).fused("forward"))
        found.append(seq(given()).shape)
        found.append(drawn)

    class Starting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            return x + 1

    look()
    *before, _ = found
    assert before[1]
    found.clear()
    mine = trace(Starting(), (given(),), {})
    assert not any("random" in effect for effect, _ in effects(mine))
    *after, drawn = found
    assert after == before
    assert all(a != b for a, b in zip(drawn, draws()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
def test_traces_of_several_threads_leave_the_compiler_on() -> None:
    torch.compiler.reset()
    compiled, y = [], given()

    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shared.other.start()
            shared.other.join(0.05)
            return x + 1

    shared: Any = types.ModuleType("shared")  # into which a trace does not look
    shared.other = threading.Thread(target=lambda: trace(nn.Linear(WIDTH, WIDTH), (y,), {}))
    trace(Waiting(), (given(),), {})
    shared.other.join()

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(y)
    assert len(compiled) == 1


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_parameters_are_traced_without_communication(mesh: Any) -> None:
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    x = DTensor.from_local(given(), mesh, [Replicate()])
    found = trace(module, (x,), {})
    assert ops(found) == ["linear"]
    assert found.dataflow.nodes[0].args[1].real is module.weight
    assert not effects(found)


def test_a_forward_that_communicates_is_kept(mesh: Any) -> None:
    with pytest.raises(KeptError, match="communicates by all_reduce"):
        traced(lambda self, x: dist.all_reduce(x) or x)

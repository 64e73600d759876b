"""Models under torch.compile: computed by sequences, and traced again as the plain ones are."""

from __future__ import annotations

import copy
import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import opfuser
from opfuser.applying import compiled, report
from opfuser.applying.forwards import state_of
from opfuser.errors import InputError
from opfuser.reading.built import Built
from opfuser.reading.kept import KeptError

from ..reading.tiny import model_of
from .models import (
    IDS,
    MODELS,
    WHOLE,
    assert_equal_steps,
    inputs_of,
    nano_gpt,
    paths,
    step,
)
from .test_modes import Checkpointed

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    # The compilers' own use of torch and of Python warns in some versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that notes the graphs that it gets."""

    def __init__(self) -> None:
        self.nodes: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        calls = [n for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
        self.nodes.append([getattr(n.target, "__name__", str(n.target)) for n in calls])
        return graph

    @property
    def sequences(self) -> list[int]:
        """How many of the nodes of each graph are sequences."""
        return [sum("opfuser_applied" in name for name in nodes) for nodes in self.nodes]


class Pair:
    """A model and one like it to which ``apply`` was applied, both compiled."""

    def __init__(self, build: Callable[[], nn.Module], fullgraph: bool = True, **how: Any) -> None:
        self.plain, self.model = build(), build()
        opfuser.apply(self.model)
        self.theirs, self.ours = Graphs(), Graphs()
        self._calls: list[Any] = [
            torch.compile(m, backend=backend, fullgraph=fullgraph, **how)
            for m, backend in ((self.plain, self.theirs), (self.model, self.ours))
        ]

    def check(self, **others: Any) -> None:
        """Asserts that a step of both is equal, and that both were traced as often."""
        models = self.plain, self.model
        theirs, ours = (step(m, c, **others) for m, c in zip(models, self._calls))
        assert_equal_steps(ours, theirs)
        assert_equal_steps(theirs, step(self.plain, **others))
        assert len(self.ours.nodes) == len(self.theirs.nodes)

    def change(self, change: Callable[[Any], Any]) -> None:
        for m in (self.plain, self.model):
            change(m)


@pytest.mark.parametrize(
    ("dtype", "device", "grad", "strictly", "reason"),
    [
        (torch.bool, "cuda", True, False, ""),
        (torch.bool, "cpu", True, False, ""),
        (torch.bool, "cpu", False, True, "adds numbers to scores of attention that are not looked"),
        (torch.float32, "cpu", False, False, ""),
        (torch.float32, "cpu", True, False, "adds a mask of numbers, which is not looked at, with"),
        (
            torch.float32,
            "cuda",
            True,
            False,
            "adds a mask of numbers, which is not looked at, with",
        ),
        (torch.float32, "cuda", False, False, "adds a mask of numbers, for which torch has a fast"),
    ],
)
def test_which_masks_are_taken(
    dtype: torch.dtype,
    device: str,
    grad: bool,
    strictly: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of numbers would have to be looked at, to tell whether gradients are exact."""
    monkeypatch.setattr(compiled, "operations_in", lambda _: [])
    decision: Any = SimpleNamespace(
        built=SimpleNamespace(aliases=[], reads_buffers=False),
        reading=(),
        arrange=None,
        masks=((1, strictly),),
    )
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        inputs = [torch.empty(2, device=device), torch.empty(2, device=device, dtype=dtype)]
        found = ""
        try:
            # Where there is no GPU, nothing else asks what would become of a mask on one.
            compiled._check(decision, inputs)
        except KeptError as kept:
            found = kept.reason
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own
def test_masks_of_transformers_have_the_kernel_of_the_plain_model(device: torch.device) -> None:
    """With padding on the left, where some queries see no key; what is there, nobody reads."""
    plain = model_of("llama", num_hidden_layers=2, head_dim=64).train().to(device, torch.bfloat16)
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    opfuser.apply(model)
    ids = torch.randint(3, 60, (2, 77), device=device)
    real = torch.ones_like(ids)
    real[0, :9] = 0
    kernels: list[set[str]] = []
    found: list[list[Tensor]] = []
    for m in (exact, plain, model):
        graphs: list[Any] = []

        def note(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph

        call: Any = m if m is exact else torch.compile(m, backend=aot_autograd(fw_compiler=note))
        y = call(input_ids=ids, attention_mask=real, **NO_CACHE)[0] * real[:, :, None]
        weights = torch.linspace(-1, 1, y.numel(), device=device, dtype=torch.float64).cos()
        (y * weights.view(y.shape)).sum().backward()
        found.append([y.detach(), *(p.grad for p in m.parameters() if p.grad is not None)])
        nodes = [str(n.target) for graph in graphs for n in graph.graph.nodes]
        kernels.append({name for name in nodes if "attention" in name})
    for want, theirs, ours in zip(*found):
        bound = 2 * (theirs - want).abs().max() + torch.finfo(torch.bfloat16).eps * want.abs().max()
        assert (ours - want).abs().max() <= bound
    assert kernels[2] == kernels[1]
    assert len(kernels[2]) == 2, "one of forward, one of backward"
    computed = {entry.path: entry.calls for entry in report(model).computed}
    assert computed == {"layers.0": 1, "layers.1": 1, "norm": 1}


NO_CACHE = {"use_cache": False}
NANO = WHOLE["nanoGPT"]


def small_llama(layers: int) -> nn.Module:
    return model_of("llama", num_hidden_layers=layers).train()


def call_of(name: str) -> dict[str, Any]:
    return NO_CACHE if name in ("Llama", "Qwen3", "GPT-2") else {}


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name", ["Llama", "TransformerEncoder", *map(slow, ("Qwen3", "GPT-2", "BERT", "ViT"))]
)
def test_sequences_are_in_the_graph(name: str) -> None:
    pair = Pair(MODELS[name])
    pair.check(**call_of(name))
    assert pair.ours.sequences == [len(WHOLE[name])]
    assert len(pair.ours.nodes[0]) < len(pair.theirs.nodes[0])
    assert paths(report(pair.model)) == WHOLE[name]


def test_what_eager_calls_have_found_out_is_used() -> None:
    pair = Pair(nano_gpt)
    step(pair.model)
    decisions = [state_of(m).decisions for m in pair.model.blocks]
    before = [list(d) for d in decisions]
    pair.check()
    pair.check()
    assert decisions == before
    assert pair.ours.sequences == [3]
    assert [entry.calls for entry in report(pair.model).computed] == [2, 2, 2]


class Negative(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def exchanged(model: Any) -> None:
    torch.manual_seed(1)
    model.blocks[1].ln_2 = Negative(32).double()


def other_weight(model: Any) -> None:
    weight = torch.linspace(-1, 1, 32, dtype=torch.float64)
    model.blocks[0].ln_1.weight = nn.Parameter(weight)


def exchanged_further(model: Any) -> None:
    model.blocks[0].ln_2.__class__ = Negative
    model.blocks[0].c_fc.weight.requires_grad_(False)
    other_weight(model)


CHANGES: list[Callable[[Any], Any]] = [
    lambda m: setattr(m.blocks[0].ln_1, "eps", 0.5),
    exchanged,
    exchanged_further,
    lambda m: setattr(m.blocks[0].drop, "p", 1.0),
    lambda m: m.eval(),
    lambda m: setattr(m.norm, "forward", lambda x: x + 1),
]


def test_changes_are_seen_as_in_the_plain_model() -> None:
    pair = Pair(nano_gpt)
    pair.check()
    for change in CHANGES:
        pair.change(change)
        pair.check()
    assert pair.ours.sequences[:-1] == [3] * (len(pair.ours.nodes) - 1)
    assert pair.ours.sequences[-1] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:opfuser.apply:UserWarning")
def test_the_attention_of_a_model_is_exchanged() -> None:
    pair = Pair(lambda: small_llama(1).eval())
    for attention in ("sdpa", "eager"):
        pair.change(lambda m, name=attention: m.set_attn_implementation(name))
        pair.check(**NO_CACHE)
    layer = report(pair.model).computed[0]
    assert layer.path == "layers.0"
    ((reason, calls),) = layer.fell_back
    assert calls == 1
    assert reason.startswith("adds a mask of numbers, which is not looked at, with gradients")


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_sizes_vary_as_in_the_plain_model(dynamic: bool | None) -> None:
    """Also where rotary tables and a mask vary with them."""
    plain, model = (small_llama(1).eval() for _ in range(2))
    opfuser.apply(model)
    calls = []
    backends = Graphs(), Graphs()
    for m, backend in zip((plain, model), backends):
        calls.append(torch.compile(m, backend=backend, fullgraph=True, dynamic=dynamic))
    for rows, length in (2, 7), (3, 5), (4, 6):
        ids = torch.randint(3, 60, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, 4:] = 0
        with torch.no_grad():
            theirs, ours = (c(ids, attention_mask=mask, **NO_CACHE)[0] for c in calls)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert len(backends[0].nodes) == len(backends[1].nodes) == (1 if dynamic else 2)
    assert set(backends[1].sequences) == {2}


class Scaling(nn.Module):
    """Scales by a number of its own, or by one that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.factor = 2.0

    def forward(self, x: Tensor, given: float = 1.0) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))) * self.factor) * given


@pytest.mark.filterwarnings("ignore:opfuser.apply:UserWarning")
@pytest.mark.parametrize("which", ["attribute", "argument"])
def test_numbers_that_dynamo_takes_for_variables(which: str) -> None:
    torch.manual_seed(0)
    plain = Scaling().double()
    model = copy.deepcopy(plain)
    opfuser.apply(model)
    backend = Graphs()
    calls = [torch.compile(plain, backend="eager"), torch.compile(model, backend=backend)]
    x = torch.randn(3, 8, dtype=torch.float64)
    for factor in (2.0, 3.0, 2.0, 5.0):
        outputs = []
        for m, call in zip((plain, model), calls):
            if which == "attribute":
                m.factor = factor
            outputs.append(call(x) if which == "attribute" else call(x, factor))
        torch.testing.assert_close(*outputs)
    assert backend.sequences[0] == 1
    if which == "attribute":
        assert {*backend.sequences} == {1}


def test_gradients_of_variable_sizes() -> None:
    block, plain = nano_gpt().blocks[0], nano_gpt().blocks[0]
    opfuser.apply(block)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for rows in (2, 3, 5):
        torch.manual_seed(rows)
        x = torch.randn(rows, 7, 32, dtype=torch.float64, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        results = []
        for m, call in (block, compiled), (plain, plain):
            m.zero_grad()
            y = call(x)
            (dx,) = torch.autograd.grad(y.square().sum(), x)
            results.append([y.detach(), dx])
        assert_equal_steps(*results)
    assert counter.frame_count == 1


def test_layers_that_are_compiled_one_by_one_share_code() -> None:
    model, plain = nano_gpt(), nano_gpt()
    opfuser.apply(model)
    graphs = Graphs()
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True)
    assert_equal_steps(step(model), step(plain))
    assert graphs.sequences == [1]
    model.blocks[1].ln_1.eps = plain.blocks[1].ln_1.eps = 0.5
    assert_equal_steps(step(model), step(plain))
    assert graphs.sequences == [1, 1]


def test_blocks_in_a_checkpoint() -> None:
    def build() -> nn.Module:
        model = nano_gpt()
        model.__class__ = Checkpointed
        return model

    model, plain = build(), build()
    opfuser.apply(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal_steps(step(model, compiled), step(plain))
    assert paths(report(model)) == NANO


def test_dropout_is_drawn_anew() -> None:
    model = nano_gpt()
    for block in model.blocks:
        block.drop.p = 0.5
    opfuser.apply(model)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    assert not torch.equal(compiled(IDS), compiled(IDS))
    model.eval()
    assert torch.equal(compiled(IDS), compiled(IDS))
    assert graphs.sequences == [3, 3]
    assert "dropout" not in graphs.nodes[0]  # nothing of the other forward is left


def test_autocast_and_gradients_are_switched_inside() -> None:
    def build() -> nn.Module:
        return Switching(nano_gpt().float())

    model, plain = build(), build()
    opfuser.apply(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    results = []
    for m, call in (model, compiled), (plain, plain):
        y = call(IDS)
        y.sum().backward()
        results.append([y.detach(), *(p.grad for p in m.parameters())])
    assert_equal_steps(*results, rtol=0.05)


class Switching(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.inner(ids)
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.inner(ids)


def test_copies_and_models_that_are_reverted_or_applied_later() -> None:
    model, plain = nano_gpt(), nano_gpt()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    want = step(plain)
    for change in (opfuser.apply, opfuser.revert, opfuser.apply):
        assert_equal_steps(step(model, compiled), want)
        change(model)
    assert_equal_steps(step(model, compiled), want)
    assert graphs.sequences == [0, 3]
    other = copy.deepcopy(model)
    other.norm.eps = plain.norm.eps = 0.5
    torch.compiler.reset()
    compiled = torch.compile(other, backend=graphs, fullgraph=True)
    assert_equal_steps(step(other, compiled), step(plain))
    assert graphs.sequences[-1] == 3


@pytest.mark.parametrize("called", [False, True])
def test_shallow_copies_are_compiled_as_themselves(called: bool) -> None:
    def change(m: Any) -> None:
        if called:
            step(m)
        for holder, name in (m, "norm"), (m.blocks[0], "ln_1"):
            child = getattr(holder, name)
            setattr(holder, name, copy.copy(child))
            child.eps = 0.5

    pair = Pair(nano_gpt)
    pair.change(change)
    pair.check()
    assert pair.ours.sequences == [3]
    pair.change(lambda m: setattr(m.norm, "eps", 0.7))
    pair.check()


def test_compiled_code_holds_no_parameter() -> None:
    model = nano_gpt()
    opfuser.apply(model)
    step(model, torch.compile(model, backend="eager", fullgraph=True))
    weight = weakref.ref(model.blocks[0].c_fc.weight)
    del model
    gc.collect()
    assert weight() is None


@pytest.mark.filterwarnings("ignore:opfuser.apply:UserWarning")
def test_a_graph_breaks_around_a_layer() -> None:
    class Broken(type(nano_gpt().blocks[0])):  # type: ignore[misc]
        inside = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.inside:
                torch._dynamo.graph_break()
            return y

    class Around(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            x = self.block(x)
            torch._dynamo.graph_break()
            return self.block(x)

    for inside in (False, True):
        torch.compiler.reset()
        results, model = [], None
        for applied in (False, True):
            model = Around(nano_gpt().blocks[0])
            model.block.__class__, model.block.inside = Broken, inside
            if applied:
                opfuser.apply(model)
            graphs = Graphs()
            compiled = torch.compile(model, backend=graphs)
            x = torch.linspace(-1, 1, 448, dtype=torch.float64).view(2, 7, 32).requires_grad_()
            y = compiled(x)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
        assert_equal_steps(*results)
        if not inside:
            assert graphs.sequences == [1, 1]
            continue
        reasons = {entry.path: entry.reason for entry in report(model).kept}
        assert reasons["block"] == "breaks the graph, under torch.compile"


def check_twice(pair: Pair) -> None:
    pair.check(use_cache=True)
    pair.change(lambda m: m.eval())
    pair.check(use_cache=True)


def test_what_is_kept_is_said_once() -> None:
    pair = Pair(lambda: small_llama(1))
    with pytest.warns(UserWarning, match=r"The first one is given a cache") as warned:
        check_twice(pair)
    assert sum("opfuser" in str(warning.message) for warning in warned) == 1
    kept = "is given a cache or other objects, which no function of a graph takes"
    reasons = {entry.path: entry.reason for entry in report(pair.model).kept}
    assert reasons["layers.0"] == f"{kept}, under torch.compile"
    assert "layers.0.mlp" in paths(report(pair.model))


def test_a_child_with_a_hook_is_called() -> None:
    calls = []

    def build() -> nn.Module:
        model = nano_gpt()
        model.blocks[0].ln_1.register_forward_hook(lambda m, args, y: calls.append(1) or 2 * y)
        return model

    pair = Pair(build)
    with pytest.warns(UserWarning, match="The first one calls 'ln_1' as it is"):
        pair.check()
    assert pair.ours.sequences == [4]  # both norms of the block are
    reasons = {entry.path: entry.reason for entry in report(pair.model).kept}
    assert reasons["blocks.0"] == "calls 'ln_1' as it is, under torch.compile"


def test_what_opfuser_refuses_is_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Built.__call__

    def refusing(self: Built, inputs: Any, cache: Any = None) -> Any:
        if len(self.sequence) > 1:
            raise InputError("Such an input is not taken. There is more to say")
        return own(self, inputs, cache)

    monkeypatch.setattr(Built, "__call__", refusing)
    pair = Pair(nano_gpt)
    with pytest.warns(UserWarning, match="is refused by opfuser"):
        pair.check()
    assert pair.ours.sequences == [1]
    reasons = {entry.path: entry.reason for entry in report(pair.model).kept}
    refused = "is refused by opfuser: Such an input is not taken, under torch.compile"
    assert reasons["blocks.0"] == refused


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_has_the_forward_of_the_class(strict: bool) -> None:
    block = nano_gpt().blocks[0].eval()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    want = block(x)
    opfuser.apply(block)
    program = torch.export.export(block, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), want)
    assert any("scaled_dot_product" in str(node.target) for node in program.graph.nodes)
    assert report(block).kept[0].reason == "torch.export traces it"


def saved_bytes(model: nn.Module, call: Callable[..., Any]) -> int:
    """Of tensors other than parameters that a step saves for backward."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call(**inputs_of(model), **NO_CACHE)
    out[0].sum().backward()
    return sum(seen.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")
def test_a_compiled_step_saves_less_than_that_of_the_plain_model() -> None:
    model, plain = (small_llama(2).float() for _ in range(2))
    opfuser.apply(model)
    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph,
        partition_fn=min_cut_rematerialization_partition,  # as inductor does
    )
    ours, theirs = (
        saved_bytes(m, torch.compile(m, backend=backend, fullgraph=True)) for m in (model, plain)
    )
    assert ours < 0.97 * theirs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="generating code needs a C++ compiler")
def test_code_is_generated() -> None:
    model, plain = nano_gpt().float(), nano_gpt().float()
    opfuser.apply(model)
    compiled = torch.compile(model, fullgraph=True)
    assert_equal_steps(step(model, compiled), step(plain), rtol=1e-3)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_equal_steps(step(model, compiled), step(plain), rtol=1e-3)

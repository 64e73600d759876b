"""Models whose layers return several tensors, and read those of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import opfuser
from opfuser.applying import report

from ..reading.families import stream
from ..reading.test_returned import Layer, Weighing
from ..reading.tiny import CACHE, WIDTH, model_of, randomized
from .models import IDS, assert_as_exact, assert_equal_steps, paths, step
from .test_compiled import Graphs

# The compilers' own use of torch and of Python warns in some versions.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:opfuser.apply. under torch.compile"),
]
Call = Callable[..., Any]


class Passing(nn.Module):
    """A feed-forward network that returns an input of its own in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 48),
            nn.Linear(48, WIDTH),
        )

    def forward(self, x: Tensor, *, given: tuple[Tensor, ...]) -> Any:
        y = x + self.down(torch.relu(self.up(self.norm(x))))
        return given[1], [y, "input", given[0]], None


class Stack(nn.Module):
    """Layers of which the first makes a bias for all, and whose weights are penalized."""

    def __init__(self, around: Call | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.passing = Passing()
        self.around = around or (lambda module, *args: module(*args))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        bias, penalty = None, torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x, bias, (nothing, weights), three = self.around(layer, x, mask, bias)
            assert (nothing, three) == (None, 3)
            penalty = penalty + weights.square().mean()
        same, (x, text, other), nothing = self.passing(x, given=(mask, bias))
        assert (text, nothing) == ("input", None)
        return x + same.sum() + other.sum(), penalty


def _step(model: nn.Module, call: Call | None = None) -> list[Tensor]:
    """Outputs and gradients of a step whose loss reads everything that layers return."""
    torch.manual_seed(0)
    dtype = next(model.parameters()).dtype
    x, mask = (stream(*shape).to(dtype).requires_grad_() for shape in ((2, 7, WIDTH), (2, 7, 7)))
    model.zero_grad()
    y, penalty = (model if call is None else call)(x, mask)
    (y.float().square().mean() + 3 * penalty).backward()
    grads = [x.grad, mask.grad, *(p.grad for p in model.parameters())]
    return [y.detach(), penalty.detach(), *(g for g in grads if g is not None)]


def _applied(kind: Call, *how: Any) -> tuple[Any, Any]:
    """A module after apply, and one like it."""
    torch.manual_seed(0)
    plain = randomized(kind(*how))
    model = copy.deepcopy(plain)
    opfuser.apply(model)
    return model, plain


@pytest.fixture
def _compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


LAYERS = ["layers.0", "layers.1", "layers.2", "passing"]


def _checkpointed(module: nn.Module, *args: Any) -> Any:
    return checkpoint(module, *args, use_reentrant=False)


def _reentrant(module: nn.Module, x: Tensor, mask: Tensor, bias: Any) -> Any:
    def first(*args: Any) -> tuple[Tensor, ...]:
        x, bias, (_, weights), _ = module(*args)
        return x, bias, weights

    x, bias, weights = checkpoint(first, x, mask, bias, use_reentrant=True)
    return x, bias, (None, weights), 3


@pytest.mark.parametrize("around", [None, _checkpointed, _reentrant])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_flow_through_all_that_layers_return(around: Call | None, training: bool) -> None:
    model, plain = _applied(Stack, around)
    for _ in range(2):
        assert_equal_steps(_step(model.train(training)), _step(plain.train(training)))
    assert paths(report(model)) == LAYERS
    entry = report(model).computed[0]
    assert [path for path, _ in entry.called] == ["attention"]


def test_layers_under_autocast() -> None:
    model, plain = _applied(Stack)
    exact = _step(plain)
    for m in (model, plain):
        m.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert_as_exact(_step(model), _step(plain), exact, 1.5)
    assert paths(report(model)) == LAYERS


def test_what_is_not_asked_for_costs_no_graph() -> None:
    model, plain = _applied(Stack)
    x, mask = stream(2, 7, WIDTH), stream(2, 7, 7)
    with torch.no_grad():
        got, want = model(x, mask), plain(x, mask)
    assert not any(y.requires_grad for y in got)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(lambda m, args, out: (out[0], None, None, out[3]), id="less"),
        pytest.param(lambda m, args, out: (out[0], 2 * out[1], None, out[3]), id="others"),
        pytest.param(lambda m, args, out: (out[0], None, out[1], out[3]), id="elsewhere"),
    ],
)
def test_what_hooks_of_a_child_return_is_handed_on(hook: Any) -> None:
    model, plain = _applied(Stack)
    x = stream(2, 7, WIDTH)
    for m in (model, plain):
        m.layers[0].attention.register_forward_hook(hook)
    for _ in range(2):
        got, want = (m.layers[0](x) for m in (model, plain))
        for ours, theirs in zip((*got[:2], got[2][1]), (*want[:2], want[2][1]), strict=True):
            assert (ours is None) == (theirs is None)
            torch.testing.assert_close(ours, theirs) if ours is not None else None


@pytest.mark.usefixtures("_compiler")
def test_under_torch_compile() -> None:
    model, plain = _applied(Stack)
    graphs = Graphs()
    call = torch.compile(model, backend=graphs, fullgraph=True)
    for _ in range(2):
        assert_equal_steps(_step(model, call), _step(plain))
    # Layers call what is kept, so that their parts are computed; what returns inputs is whole.
    assert graphs.sequences == [2 * 3 + 1]
    assert "passing" in paths(report(model))


@pytest.mark.usefixtures("_compiler")
def test_an_input_that_is_given_twice_is_one_under_torch_compile() -> None:
    model, plain = _applied(Passing)
    graphs = Graphs()
    call = torch.compile(model, backend=graphs, fullgraph=True)
    x, other = stream(2, 7, WIDTH), stream(3)
    for given in ((x, other), (other, x), (other, other)):
        got, want = (each(given=given, x=x) for each in (call, plain))
        assert got[0] is given[1]
        assert got[1][1:] == ["input", given[0]]
        assert got[1][2] is given[0]
        torch.testing.assert_close(got[1][0], want[1][0])
    assert graphs.sequences == [1, 1, 1]


class Switches(nn.Module):
    """Calls a child that computes something without gradients, perhaps without gradients itself."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.around = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), around
        self.child = Detaches()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(self.norm(x))
        with torch.set_grad_enabled(not self.around):
            y = self.child(h)
        return torch.relu(self.linear(h + y))


class Detaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.linear(x).cos()
        return x * scale.sin()


@pytest.mark.parametrize("around", [True, False])
def test_children_are_called_in_the_mode_of_the_module_or_it_is_kept(around: bool) -> None:
    model, plain = _applied(Switches, around)
    results = []
    for m in (model, plain):
        torch.manual_seed(0)
        y = m(stream(2, 7, WIDTH).requires_grad_())
        results.append([y, *torch.autograd.grad(y.sum(), [*m.parameters()], allow_unused=True)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)
    kept = {entry.path: entry.reason for entry in report(model).kept}
    assert ("" in paths(report(model))) == (not around)
    if around:
        assert kept[""] == "calls 'child' with gradients or autocast switched"


FAMILIES = "bloom codegen gpt_neo gptj mpt persimmon t5".split()


def _family(name: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """(a model after apply, one like it, a call of them with padding)."""
    model, plain = (model_of(name, "eager", use_cache=False) for _ in range(2))
    opfuser.apply(model)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    others = {"decoder_input_ids": IDS.flip(1)} if name == "t5" else {}
    return model, plain, {"attention_mask": mask, **others}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("training", [True, False])
def test_families_whose_layers_return_several_tensors(name: str, training: bool) -> None:
    model, plain, given = _family(name)
    for others in (given, given, {**given, "attention_mask": None}):
        got, want = (step(m.train(training), **others) for m in (model, plain))
        assert_equal_steps(got, want, 1e-5)
    layers = [p for p in paths(report(model)) if p.rpartition(".")[2].isdecimal()]
    assert len(layers) == (4 if name == "t5" else 2)


def _assert_equal_attentions(got: Any, want: Any) -> None:
    names = [name for name in want if "attentions" in name]
    assert names
    for name in names:
        for ours, theirs in zip(got[name], want[name], strict=True):
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_attentions_that_are_asked_for_are_the_same(name: str) -> None:
    model, plain, given = _family(name)
    given = {"input_ids": IDS, **given}
    for m in (model, plain):  # and after calls without them
        m(**given)
    for _ in range(2):
        got, want = (m(**given, output_attentions=True) for m in (model, plain))
        _assert_equal_attentions(got, want)
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
        (first, *_), (other, *_) = (
            out["attentions" if "attentions" in out else "encoder_attentions"]
            for out in (got, want)
        )
        assert first.requires_grad == other.requires_grad


def _holders_of_tables(model: Any) -> list[Any]:
    """Every layer's attention, or one module of the model from transformers 5.24 on."""
    return [m for m in model.modules() if "embed_positions" in m._buffers]


@pytest.mark.parametrize("name", ["codegen", "gptj"])
def test_tables_that_a_buffer_holds_are_read_at_every_call(name: str) -> None:
    model, plain, _ = _family(name)
    held = [_holders_of_tables(m.eval()) for m in (model, plain)]
    for *_, last in held:
        last.embed_positions.mul_(0.5)  # unlike that of the first layer
    assert_equal_steps(step(model), step(plain), 1e-5)
    for first, *_ in held:
        first.embed_positions.mul_(0.7)
    assert_equal_steps(step(model), step(plain), 1e-5)
    for first, *_ in held:
        first.embed_positions = first.embed_positions.flip(0)
    for others in ({}, {"position_ids": torch.tensor([[3, 1, 2, 0, 4, 6, 5], [*range(7)]])}):
        assert_equal_steps(step(model, **others), step(plain, **others), 1e-5)
    assert {"h.0", "h.1"} <= set(paths(report(model)))


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"t5"}))
@pytest.mark.parametrize("grad", [True, False])
def test_with_caches(name: str, grad: bool) -> None:
    model, plain, _ = _family(name)
    results = []
    for m in (model.eval(), plain.eval()):
        m.config.use_cache = True
        with torch.set_grad_enabled(grad):
            first = m(input_ids=IDS)
            second = m(input_ids=IDS[:, :2], **{CACHE: first.past_key_values})
            third = m(input_ids=IDS[:, :1], **{CACHE: second.past_key_values})
        results.append([out[0] for out in (first, second, third)])
        assert third.past_key_values.get_seq_length() == IDS.shape[1] + 3
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


class Caching(nn.Module):
    """Attention that extends a cache, and returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        k, v = cache.update(k, v, 0)
        weights = (q @ k.mT * 0.3).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("grad", [True, False])
def test_weights_of_keys_that_a_cache_holds(grad: bool) -> None:
    caches = pytest.importorskip("transformers.cache_utils")
    model, plain = _applied(Caching)
    inputs = [stream(2, length, WIDTH) for length in (7, 7, 1)]
    results = []
    for m in (model, plain):
        cache = caches.DynamicCache()
        with torch.set_grad_enabled(grad):
            results.append([y for x in inputs for y in m(x, cache)])
        (weights, *_) = results[-1][1:]
        assert weights.requires_grad == grad
    torch.testing.assert_close(*results)
    assert ("" in paths(report(model))) == grad


@pytest.mark.parametrize("name", ["bloom", "codegen", "gptj"])
def test_steps_that_fill_a_cache(name: str) -> None:
    """Its keys are those of the call alone, of which weights are returned."""
    model, plain, given = _family(name)
    for m in (model, plain):
        m.config.use_cache = True
    for _ in range(2):
        got, want = (step(m.train(), **given) for m in (model, plain))
        assert_equal_steps(got, want, 1e-5)
    entries = [e for e in report(model).computed if e.path in ("h.0", "h.1")]
    assert len(entries) == 2
    for entry in entries:
        assert [path for path, _ in entry.called] == (["mlp.gelu_impl"] if name == "bloom" else [])


@pytest.mark.usefixtures("_compiler")
def test_weights_of_attention_under_torch_compile() -> None:
    model, plain = _applied(Weighing)
    graphs = Graphs()
    call = torch.compile(model, backend=graphs, fullgraph=True)
    results = []
    for each in (call, plain):
        torch.manual_seed(1)
        x = stream(2, 7, WIDTH).requires_grad_()
        y, weights = each(x)
        weight = model.qkv.weight if each is call else plain.qkv.weight
        loss = y.square().mean() + (weights * stream(2, 4, 7, 7)).sum()
        results.append([y, weights, *torch.autograd.grad(loss, [x, weight])])
    torch.testing.assert_close(*results)
    assert graphs.sequences == [1]


@pytest.mark.usefixtures("_compiler")
def test_buffers_are_in_no_function_of_a_graph() -> None:
    model, plain, _ = _family("gptj")
    for m in (model.eval(), plain.eval()):
        _holders_of_tables(m)[-1].embed_positions.mul_(0.5)
    call = torch.compile(model, backend=Graphs())
    assert_equal_steps(step(model, call), step(plain), 1e-5)
    reasons = [reason for entry in report(model).kept for reason, _ in entry.fell_back]
    in_layers = len(_holders_of_tables(model)) > 1
    assert any("made of a buffer" in reason for reason in reasons) == in_layers


@pytest.mark.parametrize("what", [lambda layer, x: x.shape[1], lambda layer, x: layer.layer_idx])
def test_sizes_and_numbers_of_layers_that_are_returned(what: Any) -> None:
    """The numbers of siblings, beside a cache, are others."""

    class Numbered(Passing):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_idx = number

        def forward(self, x: Tensor, cache: Any) -> Any:  # type: ignore[override]
            return x + self.down(torch.relu(self.up(self.norm(x)))), what(self, x)

    plain = [randomized(Numbered(number)) for number in range(2)]
    for layer in plain:
        model = copy.deepcopy(layer)
        opfuser.apply(model)
        for length in (7, 9, 7):
            x, cache = stream(2, length, WIDTH), DynamicCache()
            (y, got), (want, number) = model(x, cache), layer(x, cache)
            torch.testing.assert_close(y, want)
            assert (type(got), got) == (int, number)
        (kept,) = [entry for entry in report(model).kept if not entry.path]
        assert kept.reason == "returns a size, or the number of a layer"

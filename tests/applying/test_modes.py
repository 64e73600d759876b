"""Modes in which a model is called, and what is around the call."""

from __future__ import annotations

import functools
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import opfuser
from opfuser.applying import report
from opfuser.errors import NotSupportedError
from tests.reading.tiny import CACHE, CHECKPOINTING

from .models import (
    IDS,
    NanoGPT,
    assert_equal_steps,
    encoder,
    llama,
    nano_gpt,
    paths,
    step,
)


class Checkpointed(NanoGPT):
    """Each block is computed again in backward."""

    how: dict[str, Any] = {"use_reentrant": False}  # noqa: RUF012 - nothing writes to it

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return self.head(self.norm(x))


# torch decides by scripts of its own what its reference implementations need.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
HOW: dict[str, dict[str, Any]] = {
    "anew": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    # What products of matrices return is kept, and overwritten by nothing.
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, PRODUCTS),
    },
}


@pytest.mark.parametrize("name", HOW)
def test_blocks_in_a_checkpoint_are_computed(name: str) -> None:
    model, plain = nano_gpt(), nano_gpt()
    model.__class__, model.how = Checkpointed, HOW[name]
    opfuser.apply(model)
    for _ in range(3):
        assert_equal_steps(step(model), step(plain))
    assert paths(report(model)) == ["blocks.0", "blocks.1", "norm"]


@functools.cache
def _factor(count: int) -> Tensor:
    return torch.full((count,), 1.0)


class RemembersFactor(type(nano_gpt().blocks[0])):  # type: ignore[misc]
    """Asks for what a function keeps, which a trace may not fill with stand-ins."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(len(_factor(1)))


class LooksOn(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", ["a cache to fill", "a mode"])
def test_what_the_model_has_computed_it_computes_again(around: str, reentrant: bool) -> None:
    model, plain = nano_gpt(), nano_gpt()
    model.__class__, model.how = Checkpointed, {"use_reentrant": reentrant}
    opfuser.apply(model)
    if around == "a cache to fill":
        for block in model.blocks:
            block.__class__ = RemembersFactor

    def forward(ids: Tensor) -> Any:
        _factor.cache_clear()
        with LooksOn() if around == "a mode" else nullcontext():
            return model(ids)

    assert_equal_steps(step(model, forward), step(plain))
    again = "is computed again in a checkpoint, where its own forward was called before"
    assert again in str(report(model))
    assert_equal_steps(step(model), step(plain))
    computed = {done.path: done for done in report(model).computed}
    assert dict(computed["blocks.0"].fell_back)[again] == 1
    assert "blocks.1" in computed


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpoint_themselves_are_computed_in_parts(reentrant: bool) -> None:
    model, plain = llama(), llama()
    for m in (model, plain):
        getattr(m, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})
        m.enable_input_require_grads()
    opfuser.apply(model)
    assert_equal_steps(step(model), step(plain))
    assert_equal_steps(step(model), step(plain))
    assert {"layers.0.self_attn", "layers.0.mlp"} <= set(paths(report(model)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    model = llama().eval()
    want = model(IDS)[0]
    opfuser.apply(model)
    for _ in range(2):
        with mode():
            torch.testing.assert_close(model(IDS)[0], want, rtol=1e-6, atol=1e-6)
    step(model)
    assert "layers.0" in paths(report(model))


@pytest.mark.parametrize("build", [llama, nano_gpt, encoder])
def test_in_fp32(build: Any) -> None:
    model, plain = build().float(), build()
    opfuser.apply(model)
    step(model)
    want = [t.float() for t in step(plain)]
    assert_equal_steps(step(model), want, rtol=1e-4)


def test_under_autocast() -> None:
    model = nano_gpt().float()
    with torch.autocast("cpu", torch.bfloat16):
        want = step(model)
        opfuser.apply(model)
        step(model)
        assert_equal_steps(step(model), want, rtol=0.05)
    # What was traced under autocast is not what is computed without.
    assert step(model)[0].dtype == torch.float32


def test_autocast_leaves_fp64_as_it_is() -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert_equal_steps(step(model), step(plain))
    assert not report(model).computed
    assert_equal_steps(step(model), step(plain))  # without autocast the same is computed
    assert report(model).computed


def test_other_sizes_than_those_of_the_first_call() -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    for batch, length in ((2, 7), (1, 7), (3, 5), (2, 1), (7, 7), (1, 1), (2, 7)):
        ids = torch.randint(3, 60, (batch, length))
        torch.testing.assert_close(model(ids)[0], plain(ids)[0], rtol=1e-6, atol=1e-6)
    assert not any(entry.fell_back for entry in report(model).computed)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_a_padded_batch(attention: str) -> None:
    model, plain = llama(attention), llama(attention)
    opfuser.apply(model)
    mask = torch.ones_like(IDS)
    mask[0, 4:] = 0
    for _ in range(2):
        assert_equal_steps(step(model, attention_mask=mask), step(plain, attention_mask=mask))
        assert_equal_steps(step(model), step(plain))
    mask[1, 5:] = 0
    assert_equal_steps(step(model, attention_mask=mask), step(plain, attention_mask=mask))
    # The same tensor with other entries.
    embedded = torch.randn(2, 7, 32, dtype=torch.float64)
    full = torch.zeros(2, 1, 7, 7, dtype=torch.float64)
    for _ in range(2):
        got, want = (m(inputs_embeds=embedded, attention_mask=full)[0] for m in (model, plain))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        full[..., 4:] = -1e30
    assert "layers.0" in paths(report(model))
    assert not report(model).computed[0].fell_back


def test_a_query_whose_keys_a_mask_hides_by_numbers() -> None:
    """As the first tokens of a batch that is padded on the left, with eager attention."""
    model, plain = llama("eager"), llama("eager")
    opfuser.apply(model)
    mask = torch.zeros(2, 1, 7, 7, dtype=torch.float64)
    for _ in range(2):
        assert_equal_steps(step(model, attention_mask=mask), step(plain, attention_mask=mask))
        mask[0, :, :3] = -1e30
    with torch.no_grad():
        got, want = (m(IDS, attention_mask=mask)[0] for m in (model, plain))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    layers = [entry for entry in report(model).computed if entry.path in ("layers.0", "layers.1")]
    reason = "adds a mask that hides all keys of a query by large numbers, with gradients enabled"
    assert [entry.fell_back for entry in layers] == [((reason, 1),)] * 2


@pytest.mark.parametrize("seen", [True, False])
def test_tables_that_are_written_in_place_are_read_again(seen: bool) -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    tables = model.rotary_emb(x, torch.arange(7)[None])
    for n in (0, 0, 1) if seen else (0, 0):  # the next layer shares what is made of them
        got, want = (m.layers[n](x, position_embeddings=tables) for m in (model, plain))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        (tables[1] if seen else tables[1].data).neg_()  # other versions of the data are not told


def test_a_cache_is_extended_as_without_apply() -> None:
    model, plain = llama().eval(), llama().eval()
    opfuser.apply(model)
    with torch.no_grad():
        for ids in (IDS, IDS[:1]):
            caches = []
            for m in (model, plain):
                out = m(ids, use_cache=True)
                for token in (5, 9):
                    last = torch.full((len(ids), 1), token)
                    out = m(last, **{CACHE: out.past_key_values}, use_cache=True)
                caches.append((out.last_hidden_state, out.past_key_values))
            (y, ours), (want, theirs) = caches
            torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
            for a, b in zip(ours.layers, theirs.layers):
                torch.testing.assert_close(a.keys, b.keys, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(a.values, b.values, rtol=1e-6, atol=1e-6)
    assert "layers.2" in paths(report(model))


def test_a_cache_while_gradients_are_recorded() -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    for _ in range(3):
        assert_equal_steps(step(model, use_cache=True), step(plain, use_cache=True))
    assert "layers.0" in paths(report(model))
    out, want = (m(IDS, use_cache=True) for m in (model, plain))
    nexts = [m(IDS[:, :1], **{CACHE: o.past_key_values}) for m, o in ((model, out), (plain, want))]
    torch.testing.assert_close(*(o.last_hidden_state for o in nexts), rtol=1e-6, atol=1e-6)
    with pytest.raises(NotSupportedError, match=r"Gradients do not flow into keys and values"):
        nexts[0].last_hidden_state.sum().backward()


def test_parameters_that_are_exchanged_for_a_call() -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    step(model)
    other = {name: 1.1 * p.detach() for name, p in model.named_parameters()}
    got, want = (functional_call(m, other, (IDS,))[0] for m in (model, plain))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert_equal_steps(step(model), step(plain))


def test_transforms_and_forward_mode_run_the_forward_of_the_class() -> None:
    model, plain = nano_gpt(), nano_gpt()
    opfuser.apply(model)
    step(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(m: Any, values: Any) -> Tensor:
        return functional_call(m, values, (IDS,)).square().sum()

    got, want = (grad(lambda v, m=m: loss(m, v))(parameters) for m in (model, plain))
    for name in got:
        torch.testing.assert_close(got[name], want[name])
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangents = [forward_ad.unpack_dual(m.norm(dual)).tangent for m in (model, plain)]
    torch.testing.assert_close(*tangents)
    reasons = {reason for entry in report(model).computed for reason, _ in entry.fell_back}
    assert {"torch.func transforms it", "forward-mode derivatives are computed"} <= reasons


def test_hooks_of_all_modules_see_all_calls() -> None:
    model = nano_gpt()
    opfuser.apply(model)
    step(model)
    seen: list[str] = []
    handle = register_module_forward_hook(lambda m, args, y: seen.append(type(m).__name__))
    try:
        step(model)
    finally:
        handle.remove()
    assert seen.count("Linear") == 9
    assert step(model)
    assert seen.count("Linear") == 9


def test_threads_call_one_model() -> None:
    model, plain = llama(), llama()
    opfuser.apply(model)
    want = plain(IDS)[0]
    got: list[Tensor] = []
    threads = [threading.Thread(target=lambda: got.append(model(IDS)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(threads)
    for y in got:
        torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)

"""Models with latent attention, whose caches keep what keys and values are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser.applying import report
from opfuser.applying.forwards import state_of
from opfuser.basic import DotProductAttention
from opfuser.errors import NotSupportedError
from opfuser.reading.plain_modules import CachedRows

from ..reading.recomputed import kept_in
from ..reading.tiny import CACHE, config_of, model_of, randomized, transformers
from .models import IDS, assert_equal_steps, paths, step

FAMILIES = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]


def pair(family: str, attention: str = "sdpa") -> tuple[Any, Any]:
    """A model to which apply was applied, and one without; both make caches."""
    model, plain = (model_of(family, attention, use_cache=True) for _ in range(2))
    opfuser.apply(model)
    return model, plain


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_with_the_caches_that_models_make(family: str, attention: str) -> None:
    model, plain = (m.train() for m in pair(family, attention))
    for _ in range(2):
        assert_equal_steps(step(model), step(plain), 1e-5)
    assert "layers.0" in paths(report(model))
    assert not report(model).computed[0].fell_back


def cache_of(kind: str, model: Any) -> Any:
    if kind == "DynamicCache":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=12)


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_steps_of_generation(family: str, kind: str) -> None:
    model, plain = (m.eval() for m in pair(family))
    padding = torch.ones_like(IDS)
    padding[1, :2] = 0
    for mask in (None, padding):
        found = []
        for m in (model, plain):
            cache, seen, outputs = cache_of(kind, m), 0, []
            for part in IDS.split([3, 1, 2, 1], 1):
                seen += part.shape[1]
                given = {} if mask is None else {"attention_mask": mask[:, :seen]}
                with torch.no_grad():
                    outputs.append(m(part, **{CACHE: cache}, **given).last_hidden_state)
            found.append([*outputs, *kept_in(cache)])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert "layers.0" in paths(report(model))
    assert not report(model).computed[0].fell_back


@pytest.mark.parametrize(("family", "static"), [("deepseek_v3", False), ("minicpm3", True)])
def test_generated_tokens_are_those_without_apply(family: str, static: bool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = config_of(family, 0.0)
        config._experts_implementation = "eager"
        models.append(randomized(transformers.AutoModelForCausalLM.from_config(config)).eval())
    model, plain = models
    opfuser.apply(model)
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if static:
        given |= {"cache_implementation": "static", "disable_compile": True}
    for ids in (IDS, IDS[:1, :4]):
        ours, theirs = (m.generate(ids, **given) for m in (model, plain))
        assert torch.equal(ours, theirs)
    beams = [m.generate(IDS, num_beams=3, **{**given, "max_new_tokens": 3}) for m in models]
    assert torch.equal(*beams)
    assert "model.layers.0" in paths(report(model))


def test_what_a_cache_keeps_has_no_gradient() -> None:
    model, plain = (m.train() for m in pair("minicpm3"))
    out, want = (m(IDS) for m in (model, plain))
    kept = [kept_in(each.past_key_values) for each in (out, want)]
    torch.testing.assert_close(*kept, rtol=1e-6, atol=1e-6)
    nexts = [
        m(IDS[:, :1], **{CACHE: o.past_key_values}) for m, o in zip((model, plain), (out, want))
    ]
    torch.testing.assert_close(*(o.last_hidden_state for o in nexts), rtol=1e-6, atol=1e-6)
    told = dict(report(model).computed[0].fell_back)
    assert told == {"reads keys of other calls, with gradients enabled": 1}
    with pytest.raises(NotSupportedError, match="Gradients do not flow into keys and values"):
        nexts[0].last_hidden_state.sum().backward()


def test_a_static_cache_with_gradients_is_left_to_the_model() -> None:
    model, plain = (m.train() for m in pair("minicpm3"))
    steps = [step(m, **{CACHE: cache_of("StaticCache", m)}) for m in (model, plain)]
    assert_equal_steps(*steps)
    told = {entry.path: entry.reason for entry in report(model).kept}
    assert told["layers.0"] == "writes to a cache, with gradients enabled"


def test_a_call_that_fails_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what it would keep is known before attention is computed."""
    model, plain = (m.eval() for m in pair("minicpm3"))
    caches = [cache_of("DynamicCache", m) for m in (model, plain)]
    with torch.no_grad():
        model(IDS, **{CACHE: caches[0]})
        plain(IDS, **{CACHE: caches[1]})

        def fails(*args: Any, **kwargs: Any) -> Tensor:
            raise NotSupportedError("It fails.")

        with monkeypatch.context() as patch:
            patch.setattr(DotProductAttention, "fuser_forward", fails)
            with pytest.raises(NotSupportedError, match="It fails"):
                model(IDS[:, :1], **{CACHE: caches[0]})
        assert [c.get_seq_length() for c in caches] == [7, 7]
        ours, theirs = (
            m(IDS[:, :1], **{CACHE: c}).last_hidden_state for m, c in zip((model, plain), caches)
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_layers_keep_in_their_own_place() -> None:
    """Though siblings are computed as one of them was read."""
    model, plain = (
        m.eval() for m in (model_of("minicpm3", num_hidden_layers=3, use_cache=True) for _ in "ab")
    )
    opfuser.apply(model)
    with torch.no_grad():
        found = [m(IDS).past_key_values for m in (model, plain)]
    torch.testing.assert_close(*map(kept_in, found), rtol=1e-6, atol=1e-6)
    numbers = [
        layer
        for decoder in model.layers
        for decision in state_of(decoder).decisions
        for op, layer in decision.built.cached
        if isinstance(op, CachedRows)
    ]
    assert numbers == [0, 1, 2]

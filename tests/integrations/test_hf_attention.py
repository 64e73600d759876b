"""opfuser's attention as an attn_implementation of transformers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import hf
from opfuser.applying import report
from opfuser.errors import NotSupportedError
from opfuser.integrations.hf.attention_function import attention_forward
from tests.applying.models import IDS, assert_equal_steps, inputs_of, step
from tests.applying.test_biases import model_of as t5_of
from tests.reading.tiny import CACHE, model_of

transformers = pytest.importorskip("transformers")

PADDED = torch.tensor([[1] * 7, [0] * 2 + [1] * 5])


@pytest.fixture(autouse=True)
def registered() -> None:
    hf.register_attention()
    hf.register_attention()


def both(family: str, other: str = "sdpa", **sizes: Any) -> tuple[Any, Any]:
    return model_of(family, "opfuser", **sizes), model_of(family, other, **sizes)


FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    "clip_vision_model": {},
    "cohere": {},
    "gemma3_text": {"sliding_window": 3},
    "glm4": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "granite": {},
    "llama": {},
    "mistral": {"sliding_window": 3},
    "olmo2": {},
    "opt": {"dropout": 0.0},
    "phi3": {},
    "qwen3": {},
    "smollm3": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "vit": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_sdpa(family: str) -> None:
    ours, theirs = both(family, **FAMILIES[family])
    assert ours.config._attn_implementation == "opfuser"
    for each in (ours, theirs):
        each.train()
    assert_equal_steps(step(ours), step(theirs))
    if "input_ids" in inputs_of(ours):
        assert_equal_steps(
            _visible(step(ours, attention_mask=PADDED)),
            _visible(step(theirs, attention_mask=PADDED)),
        )


def _visible(found: list[Tensor]) -> list[Tensor]:
    """Without what padded places return, which the gradients are of nevertheless."""
    return [found[0][PADDED.bool()]]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gemma2", {"sliding_window": 3, "attn_logit_softcapping": 2.0}),
        ("gpt_oss", {"sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_caps_and_sinks_are_those_of_eager(family: str, sizes: dict[str, Any]) -> None:
    ours, theirs = both(family, "eager", **sizes)
    if family == "gpt_oss":  # whose experts torch computes in no wider dtype
        ours, theirs = ours.float(), theirs.float()
    with torch.no_grad():
        for model in (ours, theirs):
            for name, p in model.named_parameters():
                if "sinks" in name:
                    p.copy_(torch.linspace(-1, 1, p.numel()))
    rtol = 1e-4 if family == "gpt_oss" else 1e-6
    assert_equal_steps(step(ours.train()), step(theirs.train()), rtol)


@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5"])
def test_t5_trains_its_table_of_positions(family: str) -> None:
    """Encoder, decoder and cross-attention, the first with padding."""
    if not getattr(transformers, f"{family}ForConditionalGeneration")._supports_sdpa:
        pytest.skip("calls no function of attention, as in transformers 5.0")
    found = []
    for implementation in ("opfuser", "sdpa"):
        model = t5_of(family, implementation)
        assert model.config._attn_implementation == implementation
        model(input_ids=IDS, attention_mask=PADDED, labels=IDS[:, :5].contiguous()).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    ours, theirs = found
    assert any("relative_attention_bias" in name for name in ours)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_caches_hold_what_they_would(family: str) -> None:
    for implementation in ("static", "dynamic"):
        ours, theirs = (m.eval() for m in both(family, sliding_window=4))
        found = []
        for model in (ours, theirs):
            model.config.use_cache = True
            cache: Any = transformers.DynamicCache(config=model.config)
            if implementation == "static":
                cache = transformers.StaticCache(config=model.config, max_cache_len=12)
            with torch.no_grad():
                outs = [
                    model(input_ids=ids, **{CACHE: cache})[0]
                    for ids in (IDS[:, :4], IDS[:, 4:5], IDS[:, 5:])
                ]
            found.append(torch.cat(outs, 1))
        torch.testing.assert_close(*found)


def test_sequences_that_one_row_holds() -> None:
    ours, theirs = both("llama")
    ids, positions = IDS.view(1, -1), torch.tensor([[*range(5), *range(9)]])
    with torch.no_grad():
        want = theirs(input_ids=ids, position_ids=positions)[0]
        alone = torch.cat([theirs(input_ids=ids[:, a:b])[0] for a, b in ((0, 5), (5, 14))], 1)
        torch.testing.assert_close(want, alone)
        torch.testing.assert_close(ours(input_ids=ids, position_ids=positions)[0], want)
    q, k = torch.randn(1, 4, 14, 8), torch.randn(1, 2, 14, 8)
    starts = torch.tensor([0, 5, 14])
    module: Any = nn.Module()
    given: dict[str, Any] = {"cu_seq_lens_q": starts, "max_length_q": 9}
    y, _ = attention_forward(module, q, k, k, None, **given)
    pieces = [
        attention_forward(module, q[:, :, a:b], k[:, :, a:b], k[:, :, a:b], None)[0]
        for a, b in ((0, 5), (5, 14))
    ]
    torch.testing.assert_close(y, torch.cat(pieces, 1))


def test_dropout_zeroes_weights_and_queries_may_be_of_one_row() -> None:
    module: Any = nn.Module()
    q, k = torch.randn(1, 4, 3, 8), torch.randn(2, 2, 5, 8)
    ones = torch.ones(2, 2, 5, 6)
    y, _ = attention_forward(module, q, k, ones, None, is_causal=False)
    torch.testing.assert_close(y, torch.ones(2, 3, 4, 6))
    y, _ = attention_forward(module, q, k, ones, None, dropout=1.0, is_causal=False)
    assert not y.any()
    many = torch.ones(2, 4, 400, 6)
    y, _ = attention_forward(module, many, many, many, None, dropout=0.25, is_causal=False)
    assert 0.95 < y.mean() < 1.05
    assert y.std() > 0.01


def test_biases_of_positions_are_added_and_have_gradients() -> None:
    module: Any = nn.Module()
    q, bias = torch.randn(2, 4, 3, 8), torch.randn(1, 4, 3, 3, requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, True, True], [True, True, True]])
    mask = mask.expand(2, 1, 3, 3)
    scores = q @ q.mT * 0.5 + bias
    want = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ q
    y, _ = attention_forward(module, q, q, q, mask, scaling=0.5, position_bias=bias)
    torch.testing.assert_close(y, want.transpose(1, 2))
    grads = [torch.autograd.grad(t.square().sum(), bias, retain_graph=True) for t in (y, want)]
    torch.testing.assert_close(*grads)
    y, _ = attention_forward(module, q, q, q, None, scaling=0.5, position_bias=bias)
    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ q
    torch.testing.assert_close(y, want.transpose(1, 2))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"output_attentions": True}, "output_attentions=True.*'eager'"),
        ({"cache": object()}, "a object.*'sdpa'"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3, requires_grad=True)}, "needs a gradient"),
        ({"attention_mask": torch.full((1, 1, 3, 3), -1e30)}, "Pass a bool mask"),
    ],
)
def test_what_is_refused(given: dict[str, Any], text: str) -> None:
    q, module = torch.randn(2, 4, 3, 8), nn.Module()
    with pytest.raises(NotSupportedError, match=f"attn_implementation='opfuser'.*{text}"):
        attention_forward(module, q, q, q, **{"attention_mask": None, **given})


def test_apply_reads_it() -> None:
    model: Any = model_of("llama", "opfuser").train()
    want = step(model)
    opfuser.apply(model)
    assert_equal_steps(step(model), want)
    assert [e.path for e in report(model).computed] == ["layers.0", "layers.1", "norm"]
    model.set_attn_implementation("sdpa")
    assert_equal_steps(step(model), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("with_sinks", [False, True])
def test_compiles_without_a_graph_break(with_sinks: bool) -> None:
    torch.compiler.reset()
    q, module = torch.randn(2, 4, 3, 8, requires_grad=True), nn.Module()
    sinks = nn.Parameter(torch.randn(4))
    given: dict[str, Any] = {"s_aux": sinks, "softcap": 2.0} if with_sinks else {}

    def call(q: Tensor) -> Tensor:
        return attention_forward(module, q, q, q, None, **given)[0]

    compiled: Any = torch.compile(call, backend="aot_eager", fullgraph=True)
    leaves = [q, sinks] if with_sinks else [q]
    got, want = ([y, *torch.autograd.grad(y.cos().sum(), leaves)] for y in (compiled(q), call(q)))
    torch.testing.assert_close(got, want)


def test_no_import_of_opfuser_imports_transformers() -> None:
    code = "import sys, opfuser.hf; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

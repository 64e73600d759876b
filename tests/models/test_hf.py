"""Decoders against their counterparts in Hugging Face's transformers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import ArgumentError, NotSupportedError
from opfuser.models import DecoderConfig, decoder_lm, hf_state_dict, load_hf
from opfuser.recipe import DelayedScaling
from tests.models.hf import (
    CONFIGS,
    EXPERTS,
    GPT2,
    SIZES,
    distance,
    hf_model,
    run,
    run_hf,
    same_model,
)

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
# One per family, for what does not depend on its details.
PACKED, CONV1D = CONFIGS["qwen2"], CONFIGS["gpt2"]


def batch(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens, and a gradient of their logits."""
    return torch.randint(37, (3, 17)).to(device), torch.randn(3, 17, 37).to(device)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_gradient(name: str, device: torch.device) -> None:
    theirs = hf_model(*CONFIGS[name]).to(device)
    data = batch(device)
    got, wanted = run(same_model(theirs, device=device), *data), run_hf(theirs, *data)
    assert {*wanted} <= {*got} <= {*wanted, "lm_head.weight"}
    for key, value in wanted.items():
        assert value.norm() > 1e-3, f"{key} tells nothing"
        assert distance(got[key], value) <= 1e-5, key


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_come_out_as_they_went_in(name: str) -> None:
    theirs = hf_model(*CONFIGS[name])
    before = theirs.state_dict()
    model = same_model(theirs)
    after = hf_state_dict(model)
    torch.testing.assert_close(after, dict(before), rtol=0, atol=0)
    assert all(t.is_contiguous() for t in after.values())
    owned = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *before.values()]}
    assert not owned & {t.untyped_storage().data_ptr() for t in after.values()}
    fresh = hf_model(*CONFIGS[name], seed=1)
    fresh.load_state_dict(after)
    torch.testing.assert_close(dict(fresh.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", [PACKED, CONV1D], ids=["packed", "conv1d"])
def test_tied_head(config: tuple[str, dict[str, Any]], tied: bool) -> None:
    family, sizes = config
    theirs = hf_model(family, {**sizes, "tie_word_embeddings": tied})
    model = same_model(theirs)
    assert (model[-1].weight is model[0].weight) == tied
    saved = {k: t for k, t in theirs.state_dict().items() if k != "lm_head.weight"}
    if tied:  # as checkpoints of tied models are stored
        load_hf(model, saved)
    else:
        with pytest.raises(ArgumentError, match=r"\(load_hf\). Received: no lm_head.weight\."):
            load_hf(model, saved)
        twin = decoder_lm(DecoderConfig.from_hf(theirs.config, tied_head=True))
        with pytest.raises(ArgumentError, match=r"lm_head.weight, which differs from .*weight\."):
            load_hf(twin, theirs.state_dict())


@pytest.mark.parametrize("config", [PACKED, CONV1D], ids=["packed", "conv1d"])
def test_checkpoint_of_the_model_without_head(config: tuple[str, dict[str, Any]]) -> None:
    """As that of GPT-2 is: without a prefix, and with the masks of older versions."""
    family, sizes = config
    theirs = hf_model(family, {**sizes, "tie_word_embeddings": True})
    inner: Any = theirs.base_model
    saved = dict(inner.state_dict())
    if family == "GPT2":
        saved |= {"h.0.attn.bias": torch.ones(1), "h.1.attn.masked_bias": torch.ones(1)}
    else:
        saved["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    model = decoder_lm(DecoderConfig.from_hf(theirs.config))
    load_hf(model, saved)
    torch.testing.assert_close(hf_state_dict(model), dict(theirs.state_dict()), rtol=0, atol=0)


def test_values_are_cast_and_the_loss_is_that_of_shifted_labels() -> None:
    theirs = hf_model(*PACKED)
    model = decoder_lm(DecoderConfig.from_hf(theirs.config, dtype=torch.float64))
    load_hf(model, theirs.bfloat16().state_dict())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    tokens, _ = batch()
    wanted = theirs.double()(input_ids=tokens, labels=tokens).loss.double()
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), wanted, rtol=1e-5, atol=0)


def test_weights_stored_as_codes() -> None:
    sizes = {**SIZES, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    theirs = hf_model("Llama", sizes)
    with opfuser.fp8_model_init(recipe=DelayedScaling()):
        model = decoder_lm(DecoderConfig.from_hf(theirs.config))
    load_hf(model, theirs.state_dict())
    after = hf_state_dict(model)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(after[name], value, rtol=0.07, atol=0.05, msg=name)
    again = copy.deepcopy(model)
    load_hf(again, after)
    torch.testing.assert_close(hf_state_dict(again), after)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model.norm.weight": None}, r"exactly the parameters.*no model.norm.weight\."),
        ({"model.extra": torch.ones(2)}, r"Received: model.extra\. Make the model with Decoder"),
        (
            {"model.layers.1.self_attn.k_proj.weight": torch.ones(24, 12)},
            r"k_proj.weight of shape \(24, 12\) in place of \(12, 24\)\.",
        ),
        (
            {f"model.layers.{n}.input_layernorm.weight": None for n in range(3)}
            | {f"model.layers.{n}.post_attention_layernorm.weight": None for n in range(3)},
            r"no model.layers.0.input_layernorm.weight, .* and 1 more\.",
        ),
    ],
    ids=["missing", "superfluous", "shape", "many"],
)
def test_refused_checkpoints_change_nothing(change: dict[str, Any], text: str) -> None:
    theirs = hf_model(*PACKED)
    model = same_model(theirs)
    before = hf_state_dict(model)
    other = {**hf_model(*PACKED, seed=1).state_dict(), **change}
    with pytest.raises(ArgumentError, match=text):
        load_hf(model, {name: t for name, t in other.items() if t is not None})
    torch.testing.assert_close(hf_state_dict(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), opfuser.Sequential(opfuser.ReLU())], ids=repr)
def test_other_models_are_refused(model: Any) -> None:
    text = rf"text_encoder\. Received: {type(model).__name__} without a module 'layers'"
    with pytest.raises(ArgumentError, match=text):
        hf_state_dict(model)
    with pytest.raises(ArgumentError, match=text):
        load_hf(model, {})


def test_configurations_are_read_by_their_attributes() -> None:
    """Here as transformers 4 has them."""
    old = SimpleNamespace(
        model_type="llama", vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=12, hidden_act="silu", rms_norm_eps=1e-6,
        tie_word_embeddings=False, initializer_range=0.01, pad_token_id=None, rope_theta=5e5,
        rope_scaling=None, attention_dropout=0.0,
    )  # fmt: skip
    assert DecoderConfig.from_hf(old, dtype=torch.bfloat16) == DecoderConfig(
        9, 8, 1, 2, 1, 12, 5e5, 1e-6, False, 0.01, dtype=torch.bfloat16
    )
    old.model_type, old.sliding_window = "qwen2", 4
    with pytest.raises(NotSupportedError, match="layer_types=None, sliding_window=4"):
        DecoderConfig.from_hf(old)


@pytest.mark.parametrize(
    ("family", "sizes", "text"),
    [
        (
            "Bloom",
            {},
            r"these types: .*llama.* .DecoderConfig.from_hf.. Received: model_type='bloom'",
        ),
        ("Llama", {**SIZES, "hidden_act": "gelu"}, r"one of silu, .* of a llama.*'gelu'"),
        ("GPT2", {**GPT2, "activation_function": "mish"}, r"activation_function must be one of"),
        (
            "GPT2",
            {**GPT2, "scale_attn_by_inverse_layer_idx": True},
            r"without scale_attn_by_inverse_layer_idx \(from_hf of a gpt2\). Received: .*=True",
        ),
        ("GPT2", {**GPT2, "add_cross_attention": True}, "without add_cross_attention"),
        ("Gemma", {**SIZES, "use_bidirectional_attention": True}, "without use_bidirectional"),
        (
            "Gemma3Text",
            {**SIZES, "rope_parameters": {"sliding_attention": LINEAR, "full_attention": LINEAR}},
            r"not scaled in layers with a window .* of a gemma3_text\). Received: .*='linear'",
        ),
        (
            "Llama",
            {**SIZES, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"rotates whole heads.* Received: partial_rotary_factor=0.5",
        ),
        (
            "Qwen3",
            {**SIZES, "layer_types": ["full_attention", "full_attention", "chunked_attention"]},
            r"or 'full_attention' \(from_hf of a qwen3\). Received: layer_types=.*Set config.layer",
        ),
        ("Mixtral", {**EXPERTS, "router_jitter_noise": 0.1}, "without router_jitter_noise"),
        (
            "Qwen3Moe",
            {**EXPERTS, "hidden_act": "gelu_pytorch_tanh"},
            "hidden_act must be one of silu",
        ),
        (
            "Llama",
            {**SIZES, "is_causal": False},
            r"earlier positions.* of a llama\). Received: is_causal=False",
        ),
        ("GPT2", {**GPT2, "is_causal": False}, r"of a gpt2\). Received: is_causal=False"),
        (
            "Llama",
            {**SIZES, "pruned_heads": {0: [1]}},
            r"without pruned_heads .* pruned_heads=\{0: \[1\]\}",
        ),
        (
            "Llama",
            {**SIZES, "per_layer_config": {1: {"intermediate_size": 12}}},
            r"without is_heterogeneous .* of a llama\). Received: is_heterogeneous=True",
        ),
        (
            "Mistral",
            {**SIZES, "sliding_window": 0},
            r"one position or more .* Received: sliding_window=0",
        ),
        (
            "Qwen2",
            {**SIZES, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            r"one position or more .* of a qwen2\). Received: sliding_window=None",
        ),
        (
            "Gemma3Text",
            {
                **SIZES,
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}
                },
            },
            r"truncated .* of a gemma3_text\). Received: truncate=False",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(family: str, sizes: dict[str, Any], text: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**sizes)
    with pytest.raises(NotSupportedError, match=text):
        DecoderConfig.from_hf(config)

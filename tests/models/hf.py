"""Small models of Hugging Face's transformers, and the same models of this library."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.models import DecoderConfig, decoder_lm, hf_state_dict, load_hf

transformers = pytest.importorskip("transformers", reason="compares with transformers")

# Nothing is a power of two or equal to anything else, where the families allow it.
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {
    **SIZES,
    "num_experts_per_tok": 2,
    "num_experts": 6,
    "moe_intermediate_size": 10,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
GPT2: dict[str, Any] = {
    "vocab_size": 37,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {**SIZES, "num_key_value_heads": 4}),
    "llama, grouped, tied, biases": (
        "Llama",
        {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama 3": (
        "Llama",
        {
            **SIZES,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral": ("Mistral", {**SIZES, "sliding_window": None, "head_dim": 8, "pad_token_id": 3}),
    "mistral, window": ("Mistral", {**SIZES, "sliding_window": 5}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2, windows": (
        "Qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 10, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {**SIZES, "head_dim": 8, "pad_token_id": 1}),
    "gemma 2": (
        "Gemma2",
        {
            **SIZES,
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 3": (
        "Gemma3Text",
        {
            **SIZES,
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "mixtral": ("Mixtral", {**EXPERTS, "sliding_window": 6}),
    "qwen2 moe": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "qwen3 moe": ("Qwen3Moe", {**EXPERTS, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3 moe, every second layer": (
        "Qwen3Moe",
        {**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied": (
        "GPT2",
        {**GPT2, "n_inner": 20, "tie_word_embeddings": False, "scale_attn_weights": False},
    ),
}


def hf_model(family: str, sizes: dict[str, Any], seed: int = 0) -> nn.Module:
    """With weights large enough that every part matters."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager")
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model: nn.Module = getattr(transformers, family.removesuffix("Text") + kind)(config)
    fill(model, 0.0 if family.startswith("Gemma") else 1.0)
    if "output_router_logits" in sizes:
        config._experts_implementation = "eager"  # others know no float64
        settle_experts(model)
    return model.train()


@torch.no_grad()
def settle_experts(model: Any) -> None:
    """Makes the token decide which experts it has, so far apart that no rounding changes them.

    The first features of the residual stream stay those of the token table. Each layer has other
    experts for them.
    """
    table = model.get_input_embeddings().weight
    for n, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight[:6] = 0
        if not hasattr(layer.mlp, "experts"):
            layer.mlp.down_proj.weight[:6] = 0
            continue
        layer.mlp.experts.down_proj[:, :6] = 0
        if hasattr(layer.mlp, "shared_expert"):
            layer.mlp.shared_expert.down_proj.weight[:6] = 0
        layer.post_attention_layernorm.weight[:6] = 1
        router = layer.mlp.gate.weight
        router *= 0.05
        router[:, :6] = 0
        for expert in range(len(router)):
            router[expert, (expert + n) % 6] = 1
    table[:, :6] = torch.rand(len(table), 6).argsort(-1) * 0.4 - 1


def fill(model: nn.Module, center: float) -> None:
    """Random parameters; ``center`` is where the weights of norms are."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.2)
            else:  # biases that all rows have in common would hide what these differ in
                p.uniform_(-0.5, 0.5).add_(0.0 if name.endswith("bias") else center)


BERT: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "type_vocab_size": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def hf_encoder(sizes: dict[str, Any], seed: int = 0) -> nn.Module:
    """BERT without its pooler, likewise."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(**sizes, attn_implementation="eager")
    model: nn.Module = transformers.BertModel(config, add_pooling_layer=False)
    fill(model, 1.0)
    return model.train()


def same_model(theirs: Any, **changes: Any) -> opfuser.Sequential:
    model = decoder_lm(DecoderConfig.from_hf(theirs.config, **changes), with_loss=False)
    load_hf(model, theirs.state_dict())
    return model


def run_hf(model: Any, tokens: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter."""
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.backward(dy.to(logits.dtype))
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": logits.detach(), **grads}


def run(model: opfuser.Sequential, tokens: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The same, by the names that they have there."""
    logits = model(tokens)
    logits.backward(dy.to(logits.dtype))
    grads = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(grads.parameters(), model.parameters()):
            p.copy_(q.grad)  # type: ignore[arg-type]
    return {"logits": logits.detach(), **hf_state_dict(grads)}


def distance(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()

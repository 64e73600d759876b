"""Small models of transformers, made from configurations, and inputs for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import opfuser.hf

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
ENCODER = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTILBERT: dict[str, Any] = {
    "vocab_size": 61,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "max_position_embeddings": 64,
}
TOP_2: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 8}
VIT: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_labels": 5}


def causal(name: str, **others: Any) -> Any:
    """A decoder with a head, its parameters all random."""
    config = getattr(transformers, f"{name}Config")(**{**DECODER, **others})
    return randomized(transformers.AutoModelForCausalLM.from_config(config))


def randomized(model: nn.Module) -> nn.Module:
    """Norms and biases are no longer ones and zeros."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p), alpha=0.3)
    return model


MODELS: dict[str, Callable[..., Any]] = {
    "llama": lambda **k: causal("Llama", **k),
    "llama with biases": lambda: causal("Llama", attention_bias=True, mlp_bias=True),
    "mistral": lambda **k: causal("Mistral", **{"sliding_window": 4, **k}),
    "qwen2": lambda: causal("Qwen2"),
    "qwen3": lambda **k: causal("Qwen3", head_dim=16, **k),
    # Up to transformers 5.17 its default, "sdpa", ignores that scores are capped.
    "gemma2": lambda: causal(
        "Gemma2",
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=7,
        attn_implementation="eager",
    ),
    "gemma3": lambda: causal("Gemma3Text", head_dim=8, sliding_window=4),
    "mixtral": lambda **k: causal("Mixtral", num_local_experts=4, **k),
    "qwen3_moe": lambda: causal("Qwen3Moe", num_experts=4, moe_intermediate_size=16, **TOP_2),
    "deepseek_v3": lambda: causal(
        "DeepseekV3",
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": lambda: causal("GptOss", num_local_experts=4, sliding_window=4, **TOP_2),
    "llama4": lambda: causal(
        "Llama4Text", num_local_experts=4, head_dim=8, intermediate_size_mlp=40
    ),
    "phi3": lambda: causal("Phi3"),
    "glm": lambda: causal("Glm", head_dim=8, eos_token_id=1),
    "opt": lambda: causal("OPT", ffn_dim=48, dropout=0.0, word_embed_proj_dim=32),
    "gpt2": lambda **k: causal(
        "GPT2", **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **k}
    ),
    "gpt_bigcode": lambda: causal("GPTBigCode", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "granite": lambda: causal("Granite", residual_multiplier=0.5),
    "gpt_neox": lambda: causal("GPTNeoX"),
    "bert": lambda **k: randomized(
        transformers.BertForMaskedLM(transformers.BertConfig(**{**ENCODER, **k}))
    ),
    "distilbert": lambda **k: randomized(
        transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**{**DISTILBERT, **k}))
    ),
    "vit": lambda **k: randomized(
        transformers.ViTForImageClassification(transformers.ViTConfig(**{**ENCODER, **VIT, **k}))
    ),
}
LAYERED = list(MODELS)


class Pair(NamedTuple):
    """A model with replaced forwards, and a copy of what it was."""

    model: Any
    untouched: Any
    report: opfuser.hf.Report


def pair(name: str, *, dtype: torch.dtype = torch.float32, **others: Any) -> Pair:
    untouched = MODELS[name](**others).to(dtype)
    model = copy.deepcopy(untouched)
    return Pair(model, untouched, opfuser.hf.apply(model))


def batch_of(name: str, *, padded: bool = True) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([1, 4, 0])}
    tokens = torch.randint(2, 61, (2, 9))
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    given = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100)}
    return {**given, "attention_mask": mask} if padded else given


class Step(NamedTuple):
    loss: Tensor
    logits: Tensor
    grads: dict[str, Tensor]


def step(model: Any, **given: Any) -> Step:
    """A training step without its update."""
    model.zero_grad()
    out = model(**given)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step(out.loss.detach(), out.logits.detach(), grads)


def assert_same(got: Step, want: Step, rtol: float = 1e-5) -> None:
    """Each relative to its largest entry; gradients that are sums near 0, to the largest of all."""
    assert set(got.grads) == set(want.grads)
    scale = max(float(grad.abs().max()) for grad in want.grads.values())
    assert_close(got.loss, want.loss, rtol)
    assert_close(got.logits, want.logits, rtol)
    for name, grad in got.grads.items():
        assert_close(grad, want.grads[name], rtol, at_least=1e-3 * scale, name=name)


def assert_close(
    got: Tensor, want: Tensor, rtol: float, *, at_least: float = 0.0, name: str = ""
) -> None:
    got, want = got.detach(), want.detach()
    error = float((got - want).abs().max())
    assert error <= rtol * max(float(want.abs().max()), at_least), (name, error)


def calls(model: nn.Module) -> dict[str, int]:
    """How many calls the own forwards of modules took that are computed otherwise, by reason."""
    found: dict[str, int] = {}
    for entry in opfuser.hf.report(model).computed:
        for reason, count in entry.fell_back:
            found[reason] = found.get(reason, 0) + count
    return found


def layers(report: opfuser.hf.Report) -> list[str]:
    """The paths of layers that are computed; nothing is kept because the reader has a mistake."""
    assert "could not be read" not in str(report)
    return [e.path for e in report.computed if e.path.rpartition(".")[2].isdigit()]


def reason(report: opfuser.hf.Report, path: str) -> str:
    """Why a module is kept."""
    (entry,) = [entry for entry in report.kept if entry.path == path]
    return entry.reason

"""Random configurations of the families that ``opfuser.models`` knows, within what it accepts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["ENCODERS", "FAMILIES", "LENGTH", "VOCABULARY", "sample", "sample_encoder"]

LENGTH = 17
VOCABULARY = 37
GATED = ["silu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "sigmoid"]
PLAIN = [*GATED, "gelu", "gelu_new", "swish", "tanh"]
EPS = [1e-6, 1e-5, 1e-2, 0.3]
Rng = random.Random
Sizes = dict[str, Any]

# What a class does not read, and its configuration holds all the same.
NOT_READ: dict[str, list[Any]] = {
    "attention_bias": [True],
    "mlp_bias": [True],
    "qkv_bias": [False],
    "hidden_act": GATED,
    "hidden_activation": GATED,
    "sliding_window": [0, 3],
    "layer_types": [["sliding_attention", "full_attention"] * 2],  # as many as there are layers
    "query_pre_attn_scalar": [5],
    "attn_logit_softcapping": [2.0],
    "final_logit_softcapping": [2.0],
    "attention_multiplier": [0.3],
    "logits_scaling": [2.0],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [0.5],
    "norm_topk_prob": [True, False],
    "shared_expert_intermediate_size": [12],
    "router_jitter_noise": [0.1],
    "qk_norm": [True],
    "use_qk_norm": [True],
    "layer_norm_eps": [0.5],
    "max_window_layers": [1],
    "pretraining_tp": [2],
}
# What each class reads besides what all do.
READ: dict[str, str] = {
    "Llama": "attention_bias mlp_bias hidden_act",
    "Mistral": "hidden_act sliding_window",
    "Mixtral": "hidden_act sliding_window router_jitter_noise",
    "Qwen2": "hidden_act sliding_window layer_types max_window_layers",
    "Qwen2Moe": "hidden_act sliding_window layer_types max_window_layers qkv_bias norm_topk_prob "
    "shared_expert_intermediate_size",
    "Qwen3": "attention_bias hidden_act sliding_window layer_types max_window_layers",
    "Qwen3Moe": "attention_bias hidden_act sliding_window norm_topk_prob",
    "Gemma": "attention_bias hidden_act",
    "Gemma2": "attention_bias hidden_activation sliding_window layer_types query_pre_attn_scalar "
    "attn_logit_softcapping final_logit_softcapping",
    "Gemma3Text": "attention_bias hidden_activation sliding_window layer_types "
    "query_pre_attn_scalar final_logit_softcapping",
}
FAMILIES = [*READ, "GPT2"]
ENCODERS = ["Bert", "ViT"]


def sample(family: str, seed: int) -> Sizes:
    """A configuration, the same for the same seed."""
    rng = Rng(f"{family} {seed}")
    if family == "GPT2":
        return _gpt2(rng)
    sizes = _decoder(rng, family)
    read = READ[family].split()
    for name in read:
        _READERS[name](rng, sizes, family)
    if family.endswith("Moe") or family == "Mixtral":
        sizes |= _experts(rng, family, sizes["num_hidden_layers"])
    for name in rng.sample(sorted(NOT_READ.keys() - {*read, *sizes}), 3):
        sizes[name] = rng.choice(NOT_READ[name])
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    return sizes


def sample_encoder(family: str, seed: int) -> Sizes:
    """Likewise."""
    rng = Rng(f"{family} {seed}")
    heads = rng.choice([1, 3, 4])
    sizes: Sizes = {
        "hidden_size": heads * rng.choice([6, 7, 8]),
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "intermediate_size": rng.randint(11, 40),
        "hidden_act": rng.choice(PLAIN),
        "layer_norm_eps": rng.choice([1e-12, *EPS]),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if family == "Bert":
        return sizes | {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": rng.choice([LENGTH, 40]),
            "type_vocab_size": rng.choice([3, 5]),
            "pad_token_id": rng.choice([None, 0, 5]),
            "chunk_size_feed_forward": rng.choice([0, 1]),
            "rms_norm_eps": 0.5,
        }
    patch = [rng.choice([2, 3]), rng.choice([2, 4])]
    square = rng.random() < 0.5
    return sizes | {
        "patch_size": patch[0] if square else patch,
        "image_size": 3 * patch[0] if square else [2 * patch[0], 3 * patch[1]],
        "num_channels": rng.choice([1, 2, 3]),
        "qkv_bias": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "encoder_stride": 3,
        "pooler_act": "relu",
    }


def _decoder(rng: Rng, family: str) -> Sizes:
    kv_heads, layers = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    heads = kv_heads * rng.choice([1, 2])
    head = rng.choice([6, 8, 10])
    sizes: Sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * head,
        "intermediate_size": rng.randint(11, 40),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": rng.choice(EPS),
        "tie_word_embeddings": rng.random() < 0.5,
        "pad_token_id": rng.choice([None, 0, 5]),
        "max_position_embeddings": rng.choice([8, 64]),
    }
    own = family in ("Gemma", "Gemma2", "Gemma3Text", "Qwen3", "Mixtral")
    if own or rng.random() < 0.5:
        head = sizes["head_dim"] = rng.choice([4, 6, 8, 12])
    ropes = [_rope(rng, head) for _ in range(2)]
    if family == "Gemma3Text":
        local = {"rope_type": "default", "rope_theta": rng.choice([50.0, 900.0])}
        full = {name: value for name, value in ropes[0].items() if name != "truncate"}
        sizes["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    elif rng.random() < 0.3:  # as configurations of transformers 4 are stored
        rope = ropes[0]
        sizes["rope_theta"] = rope.pop("rope_theta")
        sizes["rope_scaling"] = {**rope, "type": rope["rope_type"]}
    elif rng.random() < 0.9:
        sizes["rope_parameters"] = ropes[0]
    if rng.random() < 0.3:
        sizes["original_max_position_embeddings"] = rng.choice([8, 24])
    return sizes


def _rope(rng: Rng, head: int) -> Sizes:
    kinds = ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
    kind = rng.choice(kinds)
    rope: Sizes = {"rope_type": kind, "rope_theta": rng.choice([30.0, 500.0, 1e6])}
    if kind != "default":
        rope["factor"] = rng.choice([1.5, 4.0])
    if kind in ("yarn", "llama3", "longrope") and rng.random() < 0.8:
        rope["original_max_position_embeddings"] = rng.choice([8, 24])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            rope[name] = [rng.uniform(1, 3) for _ in range(head // 2)]
    if kind == "proportional":
        rope["partial_rotary_factor"] = rng.choice([0.5, 1.0])
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        rope["attention_factor"] = 1.3
    if kind in ("yarn", "longrope") and rng.random() < 0.2:
        rope["factor"] = None
    if kind == "yarn":
        given: Sizes = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 0.7}
        for name in rng.sample(sorted(given), 2):
            rope[name] = given[name]
        if rng.random() < 0.5:
            rope["mscale_all_dim"] = 1.2
    return rope


def _experts(rng: Rng, family: str, layers: int) -> Sizes:
    number = rng.choice([4, 6])
    sizes: Sizes = {
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "output_router_logits": False,
        "num_local_experts" if family == "Mixtral" else "num_experts": number,
    }
    if family != "Mixtral":
        sizes["moe_intermediate_size"] = rng.choice([10, 12])
        sizes["decoder_sparse_step"] = rng.choice([1, 1, 2])
        sizes["mlp_only_layers"] = rng.choice([None, [], [0], [layers - 1]])
    sizes["hidden_act"] = "silu"
    return sizes


def _gpt2(rng: Rng) -> Sizes:
    heads = rng.choice([1, 3, 4])
    return {
        "vocab_size": VOCABULARY,
        "n_embd": heads * rng.choice([6, 7, 8]),
        "n_layer": rng.choice([1, 2, 3]),
        "n_head": heads,
        "n_positions": rng.choice([LENGTH, 32]),
        "n_inner": rng.choice([None, 21]),
        "activation_function": rng.choice(PLAIN),
        "layer_norm_epsilon": rng.choice(EPS),
        "tie_word_embeddings": rng.random() < 0.5,
        "scale_attn_weights": rng.random() < 0.5,
        "reorder_and_upcast_attn": rng.random() < 0.5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": rng.choice([None, 3]),
    }


def _setter(name: str, *choices: Any) -> Callable[[Rng, Sizes, str], None]:
    def set_one(rng: Rng, sizes: Sizes, family: str) -> None:
        sizes[name] = rng.choice(choices)

    return set_one


def _window(rng: Rng, sizes: Sizes, family: str) -> None:
    windows = [1, 3, 6, 40]
    sizes["sliding_window"] = rng.choice(windows)
    if family in ("Mistral", "Mixtral") and rng.random() < 0.3:
        sizes["sliding_window"] = None
    if family.startswith("Qwen"):
        sizes["use_sliding_window"] = rng.random() < 0.7


def _layer_types(rng: Rng, sizes: Sizes, family: str) -> None:
    if rng.random() < 0.4:
        return
    kinds = ["full_attention"]
    if sizes.get("use_sliding_window", True):
        kinds.append("sliding_attention")
    sizes["layer_types"] = [rng.choice(kinds) for _ in range(sizes["num_hidden_layers"])]


_READERS: dict[str, Callable[[Rng, Sizes, str], None]] = {
    "attention_bias": _setter("attention_bias", True, False),
    "mlp_bias": _setter("mlp_bias", True, False),
    "qkv_bias": _setter("qkv_bias", True, False),
    "hidden_act": _setter("hidden_act", *GATED),
    "hidden_activation": _setter("hidden_activation", *GATED),
    "sliding_window": _window,
    "layer_types": _layer_types,
    "max_window_layers": _setter("max_window_layers", 0, 1, 2),
    "norm_topk_prob": _setter("norm_topk_prob", True, False),
    "shared_expert_intermediate_size": _setter("shared_expert_intermediate_size", 14, 20),
    "router_jitter_noise": _setter("router_jitter_noise", 0.0),
    "query_pre_attn_scalar": _setter("query_pre_attn_scalar", 5, 12, 40),
    "attn_logit_softcapping": _setter("attn_logit_softcapping", None, 1.5, 5.0),
    "final_logit_softcapping": _setter("final_logit_softcapping", None, 1.5, 5.0),
}

"""Tiny models of every family of transformers that can be made so, and the calls of their modules.

A configuration is that of its class with small numbers in place of those whose names say that they
are sizes. What is left out here, and why, :func:`model_of` raises.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from .recomputed import Example

transformers = pytest.importorskip("transformers")
# The keyword for a cache of keys and values, which has this name from transformers 5.24 on.
_NAMES = inspect.signature(transformers.LlamaModel.forward).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"
# As methods and an argument of a Trainer begin; transformers 5.0 has the second name.
_NEW = hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable")
CHECKPOINTING = "activation_checkpointing" if _NEW else "gradient_checkpointing"
CONFIG_MAPPING = transformers.models.auto.configuration_auto.CONFIG_MAPPING
CONFIG_MAPPING_NAMES = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
MODEL_MAPPING_NAMES = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES

BATCH, LENGTH, WIDTH = 2, 7, 32
_PARAMETERS_AT_MOST = 10_000_000
# The first pattern that the name of an integer matches gives the number in its place.
_SIZES = {
    r"v_head_dim|qk_head_dim": 16,
    r".*head_dim|d_kv|kv_channels|attention_head_size|rotary_dim|.*_rotary_dim": 8,
    r".*lora_rank": 12,
    r"num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num": 2,
    r".*attention_heads|n_heads?|num_heads": 4,
    r".*intermediate_size.*|n_inner|d_ff|.*ffn_dim|ffn_.*size|.*ffn_embed_dim|mlp_dim": 48,
    r".*hidden_size|d_model|n_embd|dim|.*embed_dim|.*embedding_size|.*projection_dim": WIDTH,
    r"word_embed_proj_dim": WIDTH,
    r"hidden_dim": 48,
    r"num_kv_shared_layers": 0,
    r"num_.*layers|n_layers?|encoder_layers|decoder_layers|.*_layers|depth": 2,
    r".*vocab_size.*": 64,
    r"num_local_experts|num_experts|n_routed_experts|moe_num_experts": 4,
    r"n_group|topk_group|n_shared_experts|num_nextn_predict_layers|first_k_dense_replace": 1,
    r"num_experts_per_tok|moe_topk|moe_top_k|num_experts_per_token|top_k_experts": 2,
    r".*position_embeddings|n_positions|max_.*positions|max_seq.*|n_ctx|sliding_window": 64,
    r"image_size": 16,
    r"patch_size": 4,
    r"pad_token_id": 0,
    r"bos_token_id": 1,
    r".*eos_token_id|decoder_start_token_id": 2,
}
# Each query has keys of its own, which are turned in part.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
# Where numbers depend on each other in a way that the names do not tell.
_OTHERS: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "bert": {"is_decoder": False},
    "codegen": {"n_ctx": 64, "rotary_dim": 4},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "distilbert": {"hidden_dim": 48},
    "esm": {"vocab_size": 64},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "glm4_moe_lite": _LATENT,
    "gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "longcat_flash": _LATENT,
    "minicpm3": _LATENT,
    "mistral4": _LATENT,
    "youtu": _LATENT,
    "llama4_text": {"no_rope_layers": [1, 0], "floor_scale": 4, "moe_layers": []},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "opt": {"ffn_dim": 48},
    "wav2vec2": {"conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [5, 2]},
}


def families() -> list[str]:
    """All families that have a model without a head."""
    return [name for name in MODEL_MAPPING_NAMES if name in CONFIG_MAPPING_NAMES]


def config_of(family: str, dropout: float, **others: Any) -> Any:
    """The configuration of a tiny model."""
    return _tiny(CONFIG_MAPPING[family], dropout, {**_OTHERS.get(family, {}), **others})


def _tiny(kind: Any, dropout: float, others: dict[str, Any]) -> Any:
    given: dict[str, Any] = {}
    for name, value in vars(kind()).items():
        if isinstance(value, transformers.PreTrainedConfig):
            given[name] = _tiny(type(value), dropout, {})
        elif name == "layer_types" and isinstance(value, (list, tuple)):
            kinds = list(dict.fromkeys(value))
            given[name] = [kinds[0], kinds[-1]]
        elif name.endswith("token_id") or type(value) is int:
            size = next((n for p, n in _SIZES.items() if re.fullmatch(p, name)), value)
            given[name] = size
        elif isinstance(value, float) and re.fullmatch(r".*dropout.*|.*_pdrop", name):
            given[name] = dropout
    return kind(**{**given, **others})


def model_of(
    family: str,
    attention: str = "sdpa",
    *,
    dropout: float = 0.0,
    use_cache: bool = False,
    **others: Any,
) -> nn.Module:
    """A tiny model in fp64 with random parameters.

    Args:
        family: type of its configuration.
        attention: how it is computed, if the family can.
        dropout: the probability of all dropouts.
        use_cache: whether it makes a cache for each call that has none.
        others: of the configuration.

    Raises:
        Exception: of many kinds, if no tiny model of a family can be made.
    """
    config = config_of(family, dropout, **others)
    return _made(transformers.AutoModel, config, attention, use_cache=use_cache)


def causal_model_of(family: str) -> nn.Module:
    """A tiny causal language model, likewise, in training."""
    return _made(transformers.AutoModelForCausalLM, config_of(family, 0.0), "sdpa").train()


def _made(kind: Any, config: Any, attention: str, *, use_cache: bool = False) -> nn.Module:
    config.use_cache = use_cache
    config._experts_implementation = "eager"
    make = kind.from_config
    sizes = []
    with torch.device("meta"), suppress(Exception):  # some cannot be made there
        empty = make(copy.deepcopy(config), attn_implementation="eager")
        sizes = [p.numel() for p in empty.parameters()]
    if sum(sizes) > _PARAMETERS_AT_MOST:
        raise ValueError(f"has {sum(sizes)} parameters")
    torch.manual_seed(0)
    try:
        model = make(config, attn_implementation=attention)
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        model = make(config, attn_implementation="eager")
    return randomized(model)


def randomized(module: nn.Module) -> nn.Module:
    """The module in fp64, none of its parameters being 0 or 1."""
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


class Found(NamedTuple):
    """A module of a model, and the first call that a module of its class gets.

    Attributes:
        path: of the module in the model.
        example: in which what was computed of parameters requires a gradient.
    """

    path: str
    example: Example


def calls_of(model: Any, **inputs: Any) -> list[Found]:
    """The calls of a model's modules that have parameters, one for each class.

    Of modules that are torch's own there is none.

    Raises:
        ValueError: none of the usual inputs fits the model.
    """
    errors = []
    for given in [inputs] if inputs else inputs_of(model):
        try:
            return list(_calls_of(model, given))
        except Exception as error:  # noqa: BLE001, PERF203 - whatever models raise for others' inputs
            errors.append(f"{type(error).__name__}: {error}")
    raise ValueError(errors[0])


def _calls_of(model: nn.Module, given: dict[str, Any]) -> Iterator[Found]:
    found: dict[type, Found] = {}
    handles = []

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if type(module) not in found:
                found[type(module)] = Found(path, Example(module, args, dict(kwargs)).again())

        return hook

    for path, module in model.named_modules():
        own = not type(module).__module__.startswith("torch.")
        if path and own and next(module.parameters(), None) is not None:
            handles.append(module.register_forward_pre_hook(note(path), with_kwargs=True))
    try:
        model(**given)
    finally:
        for handle in handles:
            handle.remove()
    for path, example in found.values():
        yield Found(path, example.detached())


def inputs_of(model: Any) -> list[dict[str, Tensor]]:
    """Calls of models, the likeliest first."""
    config = model.config
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (BATCH, LENGTH))
    size = getattr(config, "image_size", 16)
    size = size if isinstance(size, int) else 16
    channels = getattr(config, "num_channels", 3)
    mels = getattr(config, "num_mel_bins", 80)
    frames = 2 * getattr(config, "max_source_positions", 16)
    images = torch.randn(BATCH, channels, size, size, dtype=torch.float64)
    both = {"input_ids": ids, "decoder_input_ids": ids}
    features = torch.randn(BATCH, mels, frames, dtype=torch.float64)
    calls = [
        {"input_ids": ids},
        both,
        {"pixel_values": images},
        {"input_ids": ids, "pixel_values": images},
        {"input_values": torch.randn(BATCH, 4000, dtype=torch.float64)},
        {"input_features": features, "decoder_input_ids": ids},
        {"input_features": features.mT.contiguous()},
        {"inputs_embeds": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)},
    ]
    main = getattr(model, "main_input_name", "input_ids")
    return sorted(calls, key=lambda call: main not in call)

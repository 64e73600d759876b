"""Configurations of Hugging Face's transformers in the words of this library.

Read by their attributes, so that transformers need not be installed. What a model does beyond its
configuration, such as the biases of Qwen2, is in the table of its ``model_type``. A configuration
may have attributes that the model of its type does not read; they are not read here either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opfuser.attention.rope_configuration import read_configuration
from opfuser.counterparts import ACTIVATIONS, GATED
from opfuser.errors import NotSupportedError

from .hf_fields import named, one_window, refuse, refuse_bidirectional, rope, unknown, windows
from .moe import MoEConfig

_PLAIN = {there: name for name, row in ACTIVATIONS.items() for there in row.hf}
_GATED = {there: name for gate, name in GATED.items() for there in ACTIVATIONS[gate].hf}


def decoder_arguments(config: Any) -> dict[str, Any]:
    """The arguments of the ``DecoderConfig`` that describes the same model.

    Raises:
        NotSupportedError: a model of a type that is not known, or with a feature that a
            ``DecoderConfig`` has no attribute for.
    """
    return _arguments(config, _DECODERS, "DecoderConfig")


def encoder_arguments(config: Any) -> dict[str, Any]:
    """Arguments of the ``EncoderConfig`` for a configuration of Hugging Face."""
    return _arguments(config, _ENCODERS, "EncoderConfig")


def image_encoder_arguments(config: Any) -> dict[str, Any]:
    """Arguments of the ``ImageEncoderConfig`` for a configuration of Hugging Face."""
    return _arguments(config, _IMAGE_ENCODERS, "ImageEncoderConfig")


_Families = dict[str, Callable[[Any], dict[str, Any]]]


def _arguments(config: Any, families: _Families, made: str) -> dict[str, Any]:
    kind = getattr(config, "model_type", type(config).__name__)
    if kind not in families:
        raise NotSupportedError.explained(
            f"A configuration must be of one of these types: {', '.join(families)}",
            where=f"{made}.from_hf",
            received=f"model_type={kind!r}",
            remedy=f"Build a {made} by its arguments, if they can express the model",
        )
    refuse(config, "is_heterogeneous", "pruned_heads")
    return families[kind](config)


def _decoder(config: Any, activation: str = "hidden_act", base: float = 10000.0) -> dict[str, Any]:
    """What all families but GPT-2 have in common: no biases, no windows.

    Args:
        activation: the attribute that names it.
        base: of rotary frequencies, where the configuration does not say it.
    """
    refuse_bidirectional(config)
    head_dim = getattr(config, "head_dim", None)
    if head_dim == config.hidden_size // config.num_attention_heads:
        head_dim = None
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "ffn_dim": config.intermediate_size,
        "activation": named(_GATED, config, activation),
        "norm_eps": config.rms_norm_eps,
        "tied_head": config.tie_word_embeddings,
        "init_std": config.initializer_range,
        "padding_idx": config.pad_token_id,
        "attention_dropout": config.attention_dropout or 0.0,
        **rope(config, base),
    }


def _attention_bias(config: Any) -> dict[str, Any]:
    bias = getattr(config, "attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


def _llama(config: Any) -> dict[str, Any]:
    bias = getattr(config, "mlp_bias", False)
    return {**_decoder(config), **_attention_bias(config), "mlp_bias": bias}


def _mistral(config: Any) -> dict[str, Any]:
    return {**_decoder(config), "window": one_window(config)}


def _qwen2(config: Any) -> dict[str, Any]:
    return {**_decoder(config), "qkv_bias": True, "window": windows(config)}


def _qwen3(config: Any) -> dict[str, Any]:
    own = {"qk_norm": True, "window": windows(config)}
    return {**_decoder(config), **_attention_bias(config), **own}


def _mixtral(config: Any) -> dict[str, Any]:
    refuse(config, "router_jitter_noise")
    mixture = _experts(config, config.num_local_experts, mixtral=True)
    return {**_decoder(config, base=1e6), "window": one_window(config), **mixture}


def _qwen2_moe(config: Any) -> dict[str, Any]:
    bias = getattr(config, "qkv_bias", True)
    shared = config.shared_expert_intermediate_size
    return {**_qwen2(config), "qkv_bias": bias, **_experts(config, config.num_experts, shared)}


def _qwen3_moe(config: Any) -> dict[str, Any]:
    own = {"qk_norm": True, "window": one_window(config)}
    mixture = _experts(config, config.num_experts)
    return {**_decoder(config), **_attention_bias(config), **own, **mixture}


def _experts(config: Any, number: int, shared: int = 0, *, mixtral: bool = False) -> dict[str, Any]:
    """What is said of experts; of Mixtral there is less to say than of others."""
    named({"silu": "swiglu"}, config, "hidden_act")
    layers = [*range(config.num_hidden_layers)]
    if not mixtral:
        step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
        layers = [n for n in layers if n not in dense and (n + 1) % step == 0 and number]
    if not layers:
        return {}
    moe = MoEConfig(
        config.hidden_size,
        config.intermediate_size if mixtral else config.moe_intermediate_size,
        number,
        config.num_experts_per_tok,
        norm_topk_prob=mixtral or config.norm_topk_prob,
        shared_ffn_dim=shared,
        shared_gate=shared > 0,
        norm_eps=config.rms_norm_eps,
        init_std=config.initializer_range,
    )
    return {
        "moe": moe,
        "moe_layers": None if len(layers) == config.num_hidden_layers else tuple(layers),
        "router_aux_loss_coef": config.router_aux_loss_coef if config.output_router_logits else 0.0,
    }


def _gemma(config: Any) -> dict[str, Any]:
    # Early versions of transformers 4 read hidden_activation, where None is the default, later ones
    # and 5 read hidden_act.
    names = "hidden_act", "hidden_activation"
    if not hasattr(config, "rope_parameters") and hasattr(config, names[1]):
        now, early = (getattr(config, name, None) or "gelu_pytorch_tanh" for name in names)
        if now != early:
            raise unknown(config, "Both names of the activation must say the same", *names)
    return {**_decoder(config), **_of_gemma(config)}


def _of_gemma(config: Any) -> dict[str, Any]:
    """What all versions have."""
    refuse(config, "use_bidirectional_attention")
    arguments = {"zero_centered_gamma": True, "embedding_scale": config.hidden_size**0.5}
    return {**_attention_bias(config), **arguments}


def _gemma2(config: Any, base: float = 10000.0) -> dict[str, Any]:
    return {
        **_decoder(config, "hidden_activation", base),
        **_of_gemma(config),
        "window": windows(config),
        "post_norms": True,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }


def _gemma3(config: Any) -> dict[str, Any]:
    local = read_configuration(config, "sliding_attention")
    if local.scaling["rope_type"] != "default":
        raise NotSupportedError.explained(
            "Rotary frequencies are not scaled in layers with a window",
            where=f"from_hf of a {config.model_type}",
            received=f"rope_type={local.scaling['rope_type']!r}",
        )
    # attn_logit_softcapping is in its configuration, but not in its computation.
    own = {"qk_norm": True, "local_rope_base": local.base, "attention_softcap": None}
    return {**_gemma2(config, 1e6), **own}


def _gpt2(config: Any) -> dict[str, Any]:
    refuse(config, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    refuse_bidirectional(config)
    return {
        "vocab_size": config.vocab_size,
        "dim": config.n_embd,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "ffn_dim": 4 * config.n_embd if config.n_inner is None else config.n_inner,
        "activation": named(_PLAIN, config, "activation_function"),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm": "layer",
        "norm_eps": config.layer_norm_epsilon,
        "tied_head": config.tie_word_embeddings,
        "init_std": config.initializer_range,
        "learned_positions": config.n_positions,
        "attention_scale": None if config.scale_attn_weights else 1.0,
        "embedding_dropout": config.embd_pdrop,
        "residual_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
    }


def _bert(config: Any) -> dict[str, Any]:
    refuse(config, "is_decoder", "add_cross_attention")
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind != "absolute":
        raise NotSupportedError.explained(
            "position_embedding_type must be 'absolute'",
            where="from_hf of a bert",
            received=repr(kind),
        )
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "ffn_dim": config.intermediate_size,
        "num_positions": config.max_position_embeddings,
        "num_types": config.type_vocab_size,
        "activation": named(_PLAIN, config, "hidden_act"),
        "norm_eps": config.layer_norm_eps,
        "padding_idx": config.pad_token_id,
        "dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "init_std": config.initializer_range,
    }


def _vit(config: Any) -> dict[str, Any]:
    def size(value: int | Sequence[int]) -> int | tuple[int, ...]:
        return value if isinstance(value, int) else tuple(value)

    share = config.hidden_size // config.num_attention_heads
    if getattr(config, "head_dim", share) != share:
        raise unknown(config, f"Heads must have {share} features, their share", "head_dim")
    return {
        "image_size": size(config.image_size),
        "patch_size": size(config.patch_size),
        "channels": config.num_channels,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "ffn_dim": config.intermediate_size,
        "qkv_bias": config.qkv_bias,
        "activation": named(_PLAIN, config, "hidden_act"),
        "norm_eps": config.layer_norm_eps,
        "dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "init_std": config.initializer_range,
    }


_IMAGE_ENCODERS: _Families = {"vit": _vit}
_ENCODERS: _Families = {"bert": _bert}
_DECODERS: _Families = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}

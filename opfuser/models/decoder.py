"""Decoder language models, their layers and the two blocks of these."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from opfuser import (
    ConstantScale,
    CrossEntropy,
    DotProductAttention,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    LoadBalancingLoss,
    PositionEmbedding,
    PrivateChannel,
    QKNorm,
    Residual,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    Tanh,
    TopKRouter,
)
from opfuser.counterparts import ACTIVATIONS, NORMS

from .config import DecoderConfig
from .embedding_scale import EmbeddingScale
from .moe import MoEConfig, experts


def _norm(config: DecoderConfig) -> LayerNorm | RMSNorm:
    return NORMS[config.norm](
        config.dim,
        eps=config.norm_eps,
        zero_centered_gamma=config.zero_centered_gamma,
        device=config.device,
        dtype=config.dtype,
    )


def _linear(config: DecoderConfig, in_features: int, out_features: int, bias: bool) -> Linear:
    linear = Linear(in_features, out_features, bias=bias, device=config.device, dtype=config.dtype)
    linear.initialize_weight(partial(nn.init.normal_, std=config.init_std))
    return linear


def _block(config: DecoderConfig, *ops: nn.Module, in_features: int, bias: bool) -> Sequential:
    """:func:`_residual` of ``out(ops(x))``.

    The weight of ``out`` is scaled so that the sum over all blocks keeps the size of one.
    """
    out = _linear(config, in_features, config.dim, bias)
    out.initialize_weight(partial(nn.init.normal_, std=_std_of_sums(config)))
    return _residual(config, *ops, out)


def _std_of_sums(config: DecoderConfig) -> float:
    """Deviation of the initial weights of a linear whose output joins the residual stream."""
    return config.init_std / math.sqrt(2 * config.num_layers)


def _residual(config: DecoderConfig, *ops: nn.Module) -> Sequential:
    """``y = x + norm(ops(norm(x)))``, where the second norm is there only if it is asked for.

    Without ``config.norm_first`` it is ``y = norm(x + ops(x))``.
    """
    behind: list[nn.Module] = [_norm(config)] if config.post_norms else []
    if config.residual_dropout:
        behind.append(Dropout(config.residual_dropout))
    if config.norm_first:
        block = Residual(_norm(config), *ops, *behind)
    else:
        block = Residual(*ops, *behind).append(_norm(config))
    block.recipe = config.recipe
    return block


def attention_block(config: DecoderConfig, layer: int = 0) -> Sequential:
    """Self-attention: ``y = x + out(attend(rope(qkv(norm(x)))))``.

    Causal and with rotary positions, unless the configuration says otherwise.

    With ``config.qk_norm``, queries and keys are normalized before they are rotated.

    Shapes: x and y ``(batch, sequence, dim)``; qkv is packed, queries first, then keys, then
    values.

    Args:
        config: of the model.
        layer: number of its layer, because windows may differ.
    """
    window = config.windows[layer]
    heads, kv_heads, size = config.num_heads, config.key_heads, config.head_features
    ops: list[nn.Module] = [
        _linear(config, config.dim, (heads + 2 * kv_heads) * size, config.qkv_bias)
    ]
    if config.qk_norm:
        norm = QKNorm(
            heads,
            size,
            num_kv_heads=kv_heads,
            eps=config.norm_eps,
            zero_centered_gamma=config.zero_centered_gamma,
            device=config.device,
            dtype=config.dtype,
        )
        ops.append(norm)
    if config.learned_positions is None:
        base, scaling = config.rope_base, config.rope_scaling
        if window is not None and config.local_rope_base is not None:
            base, scaling = config.local_rope_base, None
        rope = RotaryEmbedding(heads, size, num_kv_heads=kv_heads, base=base, scaling=scaling)
        ops.append(rope)
    attention = DotProductAttention(
        heads,
        kv_heads,
        config.causal,
        scale=config.attention_scale,
        window=window,
        softcap=config.attention_softcap,
        dropout_p=config.attention_dropout,
    )
    ops.append(attention)
    return _block(config, *ops, in_features=heads * size, bias=config.out_bias)


def mlp_block(config: DecoderConfig) -> Sequential:
    """Feed-forward block: ``y = x + down(activation(up(norm(x))))``.

    Shapes: x and y ``(..., dim)``. With a gated activation, one weight ``(2 ffn_dim, dim)`` holds
    gate and up, gate first.

    Args:
        config: of the model.
    """
    row = ACTIVATIONS[config.activation]
    activation, features = row.make(), config.ffn_features
    if config.recompute == "mlp":
        activation.recompute_mlp = True
    up = _linear(config, config.dim, (1 + row.gated) * features, config.mlp_bias)
    return _block(config, up, activation, in_features=features, bias=config.mlp_bias)


def swiglu_block(config: DecoderConfig) -> Sequential:
    """Gated feed-forward block: ``y = x + down(silu(gate(norm(x))) * up(norm(x)))``.

    Like :func:`mlp_block`, but always with this activation.

    Args:
        config: of the model.
    """
    return mlp_block(replace(config, activation="swiglu"))


def _experts_block(config: DecoderConfig, moe: MoEConfig) -> Sequential:
    """Feed-forward block of experts: ``y = x + experts(norm(x))``."""
    own = {name: getattr(config, name) for name in ("init_std", "device", "dtype")}
    mixture = experts(replace(moe, recipe=None, **own))
    std = _std_of_sums(config)
    nn.init.normal_(mixture.get_parameter("down.weight"), std=std)
    if moe.shared_ffn_dim:
        shared = mixture.get_submodule("shared_down")
        assert isinstance(shared, Linear)
        shared.initialize_weight(partial(nn.init.normal_, std=std))
    return _residual(config, mixture)


def decoder_layer(config: DecoderConfig, layer: int = 0) -> Sequential:
    """An attention block and a feed-forward block, named ``attention`` and ``mlp``.

    The second has experts, as in :func:`moe_block`, according to ``config.moe`` and
    ``config.moe_layers``.

    Args:
        config: of the model.
        layer: number of the layer, because windows and feed-forward blocks may differ.
    """
    inside = replace(config, recipe=None)
    if config.moe is not None and layer in config.expert_layers:
        mlp = _experts_block(inside, config.moe)
    else:
        mlp = mlp_block(inside)
    blocks = {"attention": attention_block(inside, layer), "mlp": mlp}
    return Sequential(blocks, recipe=config.recipe)


def decoder_layers(config: DecoderConfig) -> Sequential:
    """All ``num_layers`` layers: from (batch, sequence, dim) to the same shape.

    Args:
        config: sizes of the model.
    """
    inside = replace(config, recipe=None)
    layers = (decoder_layer(inside, layer) for layer in range(config.num_layers))
    return Sequential(*layers, recipe=config.recipe)


def _embedding(config: DecoderConfig) -> dict[str, nn.Module]:
    """From tokens to the input of the first layer."""
    to: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
    table = Embedding(config.vocab_size, config.dim, padding_idx=config.padding_idx, **to)
    nn.init.normal_(table.weight, std=config.init_std)
    if config.padding_idx is not None:
        nn.init.zeros_(table.weight[config.padding_idx])
    modules: dict[str, nn.Module] = {"embedding": table}
    if config.embedding_scale is not None:
        modules["scale"] = EmbeddingScale(config.embedding_scale)
    if config.learned_positions is not None:
        positions = PositionEmbedding(config.learned_positions, config.dim, **to)
        nn.init.normal_(positions.weight, std=config.init_std)
        modules["positions"] = positions
    if config.embedding_dropout:
        modules["dropout"] = Dropout(config.embedding_dropout)
    return modules


def _balanced_layers(
    config: DecoderConfig, with_loss: bool
) -> tuple[Sequential, LoadBalancingLoss | None]:
    """All layers, and the loss of all their routers together if it has a reader."""
    inside, moe = replace(config, recipe=None), config.moe
    coefficient = config.router_aux_loss_coef if with_loss else 0.0
    if moe is None or not config.expert_layers or not (moe.aux_loss or coefficient):
        return decoder_layers(inside), None
    layers = decoder_layers(replace(inside, moe=replace(moe, aux_loss=False, balance_terms=True)))
    routers = [op for op in layers.modules() if isinstance(op, TopKRouter)]
    balance = LoadBalancingLoss(len(routers), coefficient)
    for n, router in enumerate(routers):
        channel, last = f"balance_terms.{n}", router.num_extra_outputs - 1
        router.set_extra_output_channel(last, channel, output_to_caller=moe.balance_terms)
        balance.set_extra_input_channel(n, channel)
    if not moe.aux_loss:
        hidden = PrivateChannel("load_balancing_loss")
        balance.set_extra_output_channel(0, hidden, output_to_caller=False)
    return layers, balance


def decoder_lm(config: DecoderConfig, with_loss: bool = True) -> Sequential:
    """A decoder language model, as one Sequential.

    Its modules are ``embedding``, ``layers``, ``norm``, ``head`` and, with a loss, ``loss``;
    depending on the configuration, ``scale``, ``positions`` and ``dropout`` after the embedding,
    ``softcap`` after the head, and ``balance`` at the end of a model without a loss. Their
    operations form one group: fusions apply across blocks and layers.

    Args:
        config: sizes of the model.
        with_loss: whether the model ends with a loss, or with logits.

    Call:
        With a loss, ``model(tokens, targets)``: the mean cross entropy in nats, 0-d, of predicting
        ``targets`` (batch, sequence), plus ``config.router_aux_loss_coef`` times the load-balancing
        loss of all routers together. Without, ``model(tokens)``: logits
        (batch, sequence, vocab_size). tokens: (batch, sequence) of int32 or int64.
        ``model[:-1]`` of a model with a loss is the same model without one. Extra outputs that
        ``config.moe`` asks for follow. Padding is told to routers by
        ``op_kwargs=router_kwargs(model, mask=mask)``, with a mask (batch, sequence) of bool that is
        True where there is no padding.
    """
    modules = _embedding(config)
    head = _linear(config, config.dim, config.vocab_size, bias=False)
    head.recipe = None  # also without a loss, which would refuse it
    if config.tied_head:
        table = modules["embedding"]
        assert isinstance(table, Embedding)
        head.weight = table.weight
    modules["layers"], balance = _balanced_layers(config, with_loss)
    if config.norm_first:
        modules["norm"] = _norm(config)
    modules["head"] = head
    if config.logit_softcap is not None:
        cap = config.logit_softcap
        modules["softcap"] = Sequential(ConstantScale(1 / cap), Tanh(), ConstantScale(cap))
    if with_loss:
        loss = CrossEntropy()
        modules["loss"] = loss if balance is None else Sequential(loss, balance)
    elif balance is not None:
        modules["balance"] = balance
    return Sequential(modules, recipe=config.recipe)

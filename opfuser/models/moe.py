"""The feed-forward block of a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from opfuser import (
    AddExtraInput,
    DropTokens,
    GroupedLinear,
    Jitter,
    Linear,
    MakeExtraOutput,
    Permute,
    PrivateChannel,
    Residual,
    RestoreTokens,
    RMSNorm,
    ScaledSwiGLU,
    Sequential,
    Sigmoid,
    SwapExtra,
    SwiGLU,
    TopKRouter,
    Unpermute,
)
from opfuser.errors import ArgumentError
from opfuser.op import BasicOperation
from opfuser.quantization.region import check_recipe
from opfuser.recipe import Recipe


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: sizes, routing, and where its parameters live.

    Attributes:
        dim: features of a token.
        ffn_dim: features inside an expert.
        num_experts: number of experts.
        top_k: number of experts per token.
        score_function: of the router: "softmax" or "sigmoid".
        norm_topk_prob: whether a token's weights are divided by their sum.
        scaling_factor: factor of the weights.
        score_correction_bias: whether a buffer corrects the scores when experts are chosen.
        num_groups: number of groups of experts, ``top_k_groups`` of which a token uses.
        top_k_groups: number of groups that a token's experts may come from.
        capacity_factor: of the experts, which drop tokens beyond it, see
            :class:`opfuser.DropTokens`; None means that no token is dropped.
        input_jitter_eps: of the noise on the router's input in training, see
            :class:`opfuser.Jitter`; 0 means none. The experts' input has no noise.
        aux_loss: whether the load-balancing loss is an extra output.
        z_loss: whether the router's z-loss is an extra output.
        balance_terms: whether the terms of the load-balancing loss are an extra output.
        tokens_per_expert: whether the number of tokens of each expert is an extra output.
        shared_ffn_dim: features inside a shared expert for all tokens; 0 means none.
        shared_gate: whether the sigmoid of a linear function of the token scales the shared
            expert's output, as in Qwen2-MoE.
        norm_eps: added to the mean square in the RMSNorm.
        init_std: standard deviation of the initial weights.
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
        recipe: of :mod:`opfuser.recipe`, for the experts' linear operations, regardless of the
            region; None follows :class:`opfuser.autocast`. Router and gate stay in high precision
            with every recipe.

    Raises:
        ArgumentError: a size is not positive, ``shared_gate`` without a shared expert, or
            ``recipe`` is neither None nor a recipe. :class:`opfuser.TopKRouter` checks the rest.
    """

    dim: int
    ffn_dim: int
    num_experts: int
    top_k: int
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    scaling_factor: float = 1.0
    score_correction_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    capacity_factor: float | None = None
    input_jitter_eps: float = 0.0
    aux_loss: bool = False
    z_loss: bool = False
    balance_terms: bool = False
    tokens_per_expert: bool = False
    shared_ffn_dim: int = 0
    shared_gate: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        names = "dim", "ffn_dim", "num_experts", "top_k"
        wrong = {name: getattr(self, name) for name in names if getattr(self, name) < 1}
        invariant = "Sizes must be positive" if wrong else ""
        if not wrong and (self.shared_ffn_dim < 0 or self.shared_gate > self.shared_ffn_dim):
            invariant = "shared_ffn_dim must be positive, or 0 without shared_gate"
            wrong = {"shared_ffn_dim": self.shared_ffn_dim, "shared_gate": self.shared_gate}
        if invariant:
            received = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
            raise ArgumentError.explained(invariant, where="MoEConfig", received=received)
        if self.recipe is not None:
            check_recipe(self.recipe, "MoEConfig")


def moe_block(config: MoEConfig) -> Sequential:
    """A mixture of experts after a norm, with its residual: ``y = x + experts(norm(x))``.

    Its modules 1 and 2 are the norm and :func:`experts`; it has the latter's extra outputs.

    Shapes: x and y ``(..., dim)``.

    Args:
        config: of the block.
    """
    norm = RMSNorm(config.dim, eps=config.norm_eps, device=config.device, dtype=config.dtype)
    block = Residual(norm, experts(replace(config, recipe=None)))
    block.recipe = config.recipe
    return block


def experts(config: MoEConfig) -> Sequential:
    r"""A mixture of experts: ``y = Σ_j w_j expert_j(x) [+ σ(g · x)] shared(x)``.

    The weights w are those of :class:`opfuser.TopKRouter` for the linear function ``router`` of x;
    the experts are ``down(silu(gate(x)) * up(x))``. ``gate_up.weight`` is ``(num_experts, 2
    ffn_dim, dim)``, gates first, and ``down.weight`` ``(num_experts, dim, ffn_dim)``. A shared
    expert is ``shared_gate_up`` and ``shared_down``, with ``shared_gate`` before its activation.
    The routing weights scale the activation instead of the output, which is equivalent, because the
    operation after it is linear.

    Extra outputs, if the configuration enables them: the tokens of each expert, the load-balancing
    loss, the z-loss, the terms of the load-balancing loss; see :class:`opfuser.TopKRouter`.

    Shapes: x and y ``(..., dim)``.

    Args:
        config: of the experts.
    """
    names = "tokens indices counts scores row_map sizes weights routed gate slots"
    tokens, indices, counts, scores, row_map, sizes, weights, routed, gate, slots = map(
        PrivateChannel, names.split()
    )
    drops = config.capacity_factor is not None
    of_rows = [*map(PrivateChannel, ("all_sizes", "all_weights"))] if drops else [sizes, weights]
    router = _router(config)
    router.set_extra_output_channel(1, counts, output_to_caller=config.tokens_per_expert)
    parts: dict[str, nn.Module] = {
        "tokens": _wired(MakeExtraOutput(), outputs=[tokens]),
        **({"jitter": Jitter(config.input_jitter_eps)} if config.input_jitter_eps else {}),
        "router": _linear(config, config.dim, config.num_experts, high_precision=True),
        "top_k": _wired(router, outputs=[indices]),
        "to_tokens": _wired(SwapExtra(), [tokens], [scores]),
        "permute": _wired(Permute(config.num_experts), [indices, scores], [row_map, *of_rows]),
    }
    if config.capacity_factor is not None:
        drop = DropTokens(config.num_experts, config.capacity_factor)
        parts["drop"] = _wired(drop, of_rows, [slots, sizes, weights])
    parts |= {
        "gate_up": _wired(_grouped(config, config.dim, 2 * config.ffn_dim), [sizes]),
        "activation": _wired(ScaledSwiGLU(), [weights]),
        "down": _wired(_grouped(config, config.ffn_dim, config.dim), [sizes]),
        **({"restore": _wired(RestoreTokens(), [slots])} if drops else {}),
        "unpermute": _wired(Unpermute(), [row_map]),
    }
    if config.shared_ffn_dim:
        parts["to_shared"] = _wired(SwapExtra(), [tokens], [routed])
        activation: nn.Module = SwiGLU()
        if config.shared_gate:
            parts["shared_gate"] = _linear(config, config.dim, 1, high_precision=True)
            parts["sigmoid"] = Sigmoid()
            parts["from_gate"] = _wired(SwapExtra(), [tokens], [gate])
            activation = _wired(ScaledSwiGLU(), [gate])
        parts["shared_gate_up"] = _linear(config, config.dim, 2 * config.shared_ffn_dim)
        parts["shared_activation"] = activation
        parts["shared_down"] = _linear(config, config.shared_ffn_dim, config.dim)
        parts["shared_add"] = _wired(AddExtraInput(), [routed])
    return Sequential(parts, recipe=config.recipe)


def router_kwargs(model: nn.Module, **keywords: Any) -> Mapping[nn.Module, dict[str, Any]]:
    """The ``op_kwargs`` that pass the same keywords, such as ``mask``, to every router.

    Args:
        model: the Sequential to call with them.
        **keywords: of a call of :class:`opfuser.TopKRouter`.
    """
    found = (op for op in model.modules() if isinstance(op, TopKRouter))
    return {op: dict(keywords) for op in found}


def _wired(
    op: BasicOperation, inputs: Sequence[str] = (), outputs: Sequence[str] = ()
) -> BasicOperation:
    """``op`` with its extra inputs and outputs connected to channels, in order."""
    for n, channel in enumerate(inputs):
        op.set_extra_input_channel(n, channel)
    for n, channel in enumerate(outputs):
        op.set_extra_output_channel(n, channel, output_to_caller=False)
    return op


def _linear(
    config: MoEConfig, in_features: int, out_features: int, *, high_precision: bool = False
) -> Linear:
    linear = Linear(in_features, out_features, bias=False, device=config.device, dtype=config.dtype)
    linear.initialize_weight(partial(nn.init.normal_, std=config.init_std))
    if high_precision:
        linear.recipe = None
    return linear


def _grouped(config: MoEConfig, in_features: int, out_features: int) -> GroupedLinear:
    linear = GroupedLinear(
        config.num_experts,
        in_features,
        out_features,
        bias=False,
        device=config.device,
        dtype=config.dtype,
        single_grouped_weight=True,
    )
    nn.init.normal_(linear.weight, std=config.init_std)
    return linear


def _router(config: MoEConfig) -> TopKRouter:
    return TopKRouter(
        config.num_experts,
        config.top_k,
        score_function=config.score_function,
        norm_topk_prob=config.norm_topk_prob,
        scaling_factor=config.scaling_factor,
        score_correction_bias=config.score_correction_bias,
        num_groups=config.num_groups,
        top_k_groups=config.top_k_groups,
        aux_loss=config.aux_loss,
        z_loss=config.z_loss,
        balance_terms=config.balance_terms,
        device=config.device,
    )

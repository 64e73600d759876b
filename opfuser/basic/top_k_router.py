"""The router of a mixture of experts."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import (
    COMPUTE_DTYPES,
    BackwardResult,
    Contexts,
    Extras,
    ForwardArguments,
    ForwardResult,
    refuse_dtype,
)
from ..distributed.collectives import all_reduce, group_size
from ..errors import ArgumentError, InputError, OpKwargsError
from ..kernels.router import (
    LossGrads,
    RouterLosses,
    RouterSettings,
    Routing,
    route,
    route_backward,
)
from ..kernels.router_plain import choice, scores_of, widened
from ..op import BasicOperation, Dtypes


class TopKRouter(BasicOperation):
    r"""Chooses k of E experts for each token, with weights.

    With logits x, scores s = softmax(x) or σ(x), and I the indices of the k largest s + b:

    .. math:: w_{tj} = \gamma\, s_{t I_{tj}} [ / \sum_i s_{t I_{ti}} ]

    The correction b of the scores, ``score_correction_bias``, affects the choice but not the
    weights. With ``num_groups`` above one, the experts form that many groups of equal size, and
    only experts of the ``top_k_groups`` groups with the largest sum of their two largest s + b are
    eligible.

    Shapes: logits ``(..., E)``; weights, the output, ``(..., k)``; their dtype is fp32 (fp64 for
    fp64 logits), as is that of all arithmetic. Extra outputs, in order:

    - the experts' indices ``(..., k)``, int64, by decreasing score;
    - the tokens of each expert ``(E,)``, int64;
    - with ``aux_loss`` the load-balancing loss, 0-d: ``E Σ_e f_e P_e`` of the T tokens, where
      ``f_e`` is the number of tokens of expert e over T and ``P_e`` the mean of its scores, which
      for σ are divided by their sum over the experts. It is k if all experts get equally many
      tokens;
    - with ``z_loss`` the mean of ``logsumexp(x)²``, 0-d;
    - with ``balance_terms`` the ``f_e``, which have no gradient, and the ``P_e``, (2, E):
      :class:`opfuser.LoadBalancingLoss` computes one loss from those of several routers.

    The losses have gradients and no coefficients: a training loss adds ``c * loss``. Without tokens
    they are 0.

    Keyword of a call (through ``op_kwargs``): ``mask``, bool, ``(...)``: the tokens that the losses
    cover; others are padding. All tokens have experts.

    Saves the logits, the indices, the mask and its number of tokens, and ``f_e`` for the first loss
    or its terms. Nothing waits for the device. On a GPU, forward is two launches, backward one, and
    sums use no atomics. NaN is the largest score, as in ``torch.topk``; among equal scores, kernels
    choose the first, while ``torch.topk``, which runs elsewhere, does not specify which.

    Sources: Shazeer et al., "Outrageously Large Neural Networks", 2017; load-balancing loss: Fedus
    et al., "Switch Transformers", 2021, eq. 4-6, summed over the k choices as in Mixtral; z-loss:
    Zoph et al., "ST-MoE", 2022, eq. 5; correction and groups: DeepSeek-AI, "DeepSeek-V3", 2024.

    Args:
        num_experts: E.
        top_k: k.
        score_function: "softmax" or "sigmoid".
        norm_topk_prob: whether a token's weights are divided by their sum.
        scaling_factor: γ.
        score_correction_bias: whether there is a buffer ``score_correction_bias`` (E,), of fp32,
            zero at first. It gets no gradient: the training loop updates it from the tokens of each
            expert, by :meth:`update_score_correction_bias`.
        num_groups: groups of experts.
        top_k_groups: number of groups that a token's experts may come from.
        aux_loss: whether to return the load-balancing loss.
        z_loss: whether to return the z-loss.
        balance_terms: whether to return the terms of the load-balancing loss.
        device: of the buffer; None is torch's default.

    Raises:
        ArgumentError: an argument is outside of its domain, or there are fewer than k experts to
            choose from.
        InputError: in forward, if the logits are not fp16, bf16, fp32 or fp64, ``(..., E)``, or the
            mask does not match them.
        OpKwargsError: another keyword is passed to forward.
    """

    kernels = ("Triton router",)
    num_extra_outputs: int = 2
    read_only: ClassVar[frozenset[str]] = frozenset(
        {"num_experts", "aux_loss", "z_loss", "balance_terms", "num_extra_outputs"}
    )

    score_correction_bias: Tensor | None

    class Saved(NamedTuple):
        logits: Tensor
        indices: Tensor
        fractions: Tensor | None
        mask: Tensor | None
        number: Tensor | None

    Settings = RouterSettings

    def __init__(  # noqa: PLR0913 - the forms that routers in use have
        self,
        num_experts: int,
        top_k: int,
        *,
        score_function: Literal["softmax", "sigmoid"] = "softmax",
        norm_topk_prob: bool = False,
        scaling_factor: float = 1.0,
        score_correction_bias: bool = False,
        num_groups: int = 1,
        top_k_groups: int = 1,
        aux_loss: bool = False,
        z_loss: bool = False,
        balance_terms: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if aux_loss or z_loss or balance_terms:
            self.num_extra_outputs = 2 + aux_loss + z_loss + balance_terms
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.score_function = score_function
        self.norm_topk_prob = norm_topk_prob
        self.scaling_factor = scaling_factor
        self.num_groups = num_groups
        self.top_k_groups = top_k_groups
        self.aux_loss = aux_loss
        self.z_loss = z_loss
        self.balance_terms = balance_terms
        self.make_settings()
        bias = None
        if score_correction_bias:
            bias = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("score_correction_bias", bias)

    def make_settings(self) -> RouterSettings:
        settings = RouterSettings(*(getattr(self, name) for name in RouterSettings._fields))
        experts, k, function, _, factor, groups, kept = settings
        invariant = ""
        if function not in ("softmax", "sigmoid"):
            invariant = 'score_function must be "softmax" or "sigmoid"'
        elif not math.isfinite(factor):
            invariant = "scaling_factor must be finite"
        elif not 1 <= k <= experts:
            invariant = "top_k must be from 1 to num_experts"
        elif not 1 <= kept <= groups or experts % groups or (groups > 1 and experts < 2 * groups):
            invariant = (
                "num_groups must divide num_experts into groups of two or more, and top_k_groups "
                "be from 1 to num_groups"
            )
        elif k > experts // groups * kept:
            invariant = "top_k_groups groups must have top_k experts"
        if invariant:
            received = ", ".join(f"{name}={value!r}" for name, value in settings._asdict().items())
            raise ArgumentError.explained(invariant, where="TopKRouter", received=received)
        return settings

    def reset_parameters(self) -> None:
        """Sets the correction of the scores, if any, to zero."""
        if self.score_correction_bias is not None:
            torch.nn.init.zeros_(self.score_correction_bias)

    @torch.no_grad()
    def update_score_correction_bias(
        self,
        tokens: Tensor,
        rate: float = 0.001,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Adds ``rate · sign(mean(tokens) - tokens)`` to the correction of the scores.

        Experts with fewer tokens than average are then chosen more often: this balances them
        without a loss. Call it once per optimizer step, on every rank. Nothing waits for the
        device.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
        2024, algorithm 1.

        Args:
            tokens: number of tokens of each expert in that step, (E,), summed over its
                micro-batches; the operation returns it as an extra output.
            rate: the change of a correction per call.
            process_group: ranks whose tokens are summed; None means all.

        Raises:
            ArgumentError: there is no correction, or the rate is not finite.
            InputError: the tokens are not (E,) integers.
        """
        bias = self.score_correction_bias
        if bias is None or not math.isfinite(rate):
            raise ArgumentError.explained(
                "A correction of the scores moves by a finite rate",
                where="TopKRouter",
                received=f"rate={rate}, score_correction_bias={bias is not None}",
                remedy="Construct the router with score_correction_bias=True",
            )
        if tokens.shape != bias.shape or tokens.dtype not in (torch.int32, torch.int64):
            raise InputError.explained(
                f"The tokens of each expert must be ({self.num_experts},) integers",
                where="TopKRouter",
                received=f"{tuple(tokens.shape)} of {tokens.dtype}",
            )
        if group_size(process_group) > 1:
            tokens = all_reduce(tokens, process_group)
        # In integers: the mean of many tokens is no number of fp32.
        bias.add_((tokens.sum() - tokens * self.num_experts).sign(), alpha=rate)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return torch.promote_types(dtypes.input, torch.float32)

    def extra_output_dtypes(self, dtypes: Dtypes) -> tuple[torch.dtype, ...]:
        losses = (self.output_dtype(dtypes),) * (self.num_extra_outputs - 2)
        return torch.int64, torch.int64, *losses

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx, kwargs = basic_op_ctxs[0], given["basic_op_kwargs"][0]
        settings = self.frozen_settings(ctx)
        mask = kwargs.get("mask")
        self._check(input_, mask, kwargs)
        bias = self.score_correction_bias
        made: Routing = route(input_, bias, mask, settings, self._losses)
        if ctx.requires_grad:
            saved = input_, made.indices, made.fractions, mask, made.number
            ctx.save_for_backward(*self.Saved(*saved))
        losses = (loss for loss in (made.aux, made.z, made.terms) if loss is not None)
        return made.weights, [(made.indices, made.tokens, *losses)]

    @property
    def _losses(self) -> RouterLosses:
        return RouterLosses(self.aux_loss, self.z_loss, self.balance_terms)

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        if not ctx.needs.input:
            return None, [()], [()]
        input_, indices, fractions, mask, number = ctx.saved_tensors
        settings = self.frozen_settings(ctx)
        given = iter([*basic_op_grad_extra_outputs[0]][2:])
        grads = LossGrads(*(next(given, None) if made else None for made in self._losses))
        routing = indices, fractions, number
        dx = route_backward(input_, grad_output, routing, mask, grads, settings)
        return dx, [()], [()]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        settings = self.make_settings()
        logits = widened(input_)
        scores = scores_of(logits, settings.score_function)
        with torch.no_grad():
            indices = choice(scores, self.score_correction_bias, settings)
        weights = scores.gather(-1, indices)
        if settings.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        tokens = torch.bincount(indices.reshape(-1), minlength=settings.num_experts)
        out = [weights * settings.scaling_factor, indices, tokens]
        mask = kwargs.get("mask")
        every = torch.ones_like(logits[..., :1], dtype=torch.bool)
        counts = every if mask is None else mask.unsqueeze(-1)
        count = counts.sum().clamp(min=1)
        one_hot = torch.zeros_like(logits).scatter(-1, indices, 1.0)
        counted = (one_hot * counts).reshape(-1, settings.num_experts).sum(0)
        probabilities = scores
        if settings.score_function == "sigmoid":
            probabilities = scores / scores.sum(-1, keepdim=True)
        probabilities = torch.where(counts, probabilities, 0)
        means = probabilities.reshape(-1, settings.num_experts).sum(0) / count
        if self.aux_loss:
            out.append(settings.num_experts * (counted / count * means).sum())
        if self.z_loss:
            squares = logits.logsumexp(-1, keepdim=True).square()
            out.append(torch.where(counts, squares, 0).sum() / count)
        if self.balance_terms:
            out.append(torch.stack([counted / count, means]))
        return tuple(out)

    def _check(self, logits: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
        others = ", ".join(name for name in kwargs if name != "mask")
        if others:
            raise OpKwargsError.explained(
                "The keyword of TopKRouter is mask", where="TopKRouter", received=others
            )
        if logits.dtype not in COMPUTE_DTYPES:
            refuse_dtype(logits, self)
        if not logits.dim() or logits.shape[-1] != self.num_experts:
            raise InputError.explained(
                f"Logits must be (..., {self.num_experts}), one for each expert",
                where="TopKRouter",
                received=f"input {tuple(logits.shape)}",
            )
        if mask is not None and (mask.dtype is not torch.bool or mask.shape != logits.shape[:-1]):
            raise InputError.explained(
                "The mask must be bool, of the logits' shape without the last dimension",
                where="TopKRouter",
                received=f"logits {tuple(logits.shape)}, mask {tuple(mask.shape)} of {mask.dtype}",
            )

    def extra_repr(self) -> str:
        text = f"num_experts={self.num_experts}, top_k={self.top_k}"
        return f"{text}, score_function={self.score_function!r}"

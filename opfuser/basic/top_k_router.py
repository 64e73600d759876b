"""The router of a mixture of experts."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..context import (
    COMPUTE_DTYPES,
    BackwardResult,
    Contexts,
    ExtraTensors,
    ForwardArguments,
    ForwardResult,
    refuse_dtype,
)
from ..errors import ArgumentError, InputError, OpKwargsError, explain
from ..op import BasicOperation, Dtypes
from ._router_math import (
    RouterSettings,
    choice,
    count_tokens,
    masked,
    probabilities_of,
    quotient_backward,
    scores_of,
    weights_backward,
    weights_of,
    widened,
)
from ._row_map import counts

__all__ = ["TopKRouter"]


class TopKRouter(BasicOperation):
    r"""Chooses k of E experts for each token, with weights.

    With logits x, scores s = softmax(x) or σ(x), and I the indices of the k largest s + b:

    .. math:: w_{tj} = \gamma\, s_{t I_{tj}} \;\big[\, / \textstyle\sum_i s_{t I_{ti}} \,\big]

    The correction b of the scores, ``score_correction_bias``, chooses but does not weigh. With
    ``num_groups`` above one the experts are cut into as many groups of the same size, and only
    those of the ``top_k_groups`` groups count whose two largest s + b have the largest sum.

    Shapes: logits ``(..., E)``; weights, the output, ``(..., k)``, of fp32 (fp64 for fp64 logits),
    as is all arithmetic. Extra outputs, in order:

    - the experts' indices ``(..., k)``, int64, by falling score;
    - the tokens of each expert ``(E,)``, int64;
    - with ``aux_loss`` the load-balancing loss, 0-d: ``E Σ_e f_e P_e`` of the T tokens, where
      ``f_e`` is the number of tokens of expert e over T and ``P_e`` the mean of its scores, for σ
      divided by their sum over the experts. It is k where all experts get the same;
    - with ``z_loss`` the mean of ``logsumexp(x)²``, 0-d.

    The losses have gradients and no coefficients: a training loss adds ``c * loss``. Without tokens
    they are 0.

    Keyword of a call (through ``op_kwargs``): ``mask``, bool, ``(...)``: which tokens the losses
    are those of, where others are padding. All tokens have experts.

    Saves the logits, the indices and the mask, and for the first loss the tokens of each expert.
    Nothing waits for the device. Equal scores are chosen among as ``torch.topk`` does.

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
            zero at first. No gradient reaches it: who trains updates it from the tokens of each
            expert.
        num_groups: groups of experts.
        top_k_groups: groups that a token's experts may be of.
        aux_loss: whether to return the load-balancing loss.
        z_loss: whether to return the z-loss.
        device: of the buffer; None is torch's default.

    Raises:
        ArgumentError: an argument is outside of its domain, or k experts cannot be chosen.
        InputError: in forward, if the logits are not fp16, bf16, fp32 or fp64, ``(..., E)``, or the
            mask does not go with them.
        OpKwargsError: another keyword is passed to forward.
    """

    num_extra_outputs: int = 2
    read_only: ClassVar[frozenset[str]] = frozenset(
        {"num_experts", "aux_loss", "z_loss", "num_extra_outputs"}
    )

    score_correction_bias: Tensor | None

    class Saved(NamedTuple):
        logits: Tensor
        indices: Tensor
        tokens_per_expert: Tensor | None
        mask: Tensor | None

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
        device: torch.device | str | None = None,
    ) -> None:
        if aux_loss or z_loss:
            self.num_extra_outputs = 2 + aux_loss + z_loss
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
            raise ArgumentError(explain(invariant, where="TopKRouter", received=received))
        return settings

    def reset_parameters(self) -> None:
        """Sets the correction of the scores, where there is one, to zero."""
        if self.score_correction_bias is not None:
            torch.nn.init.zeros_(self.score_correction_bias)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return torch.promote_types(dtypes.input, torch.float32)

    def extra_output_dtypes(self, dtypes: Dtypes) -> tuple[torch.dtype, ...]:
        losses = (self.output_dtype(dtypes),) * (self.num_extra_outputs - 2)
        return torch.int64, torch.int64, *losses

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx, kwargs = basic_op_ctxs[0], given["basic_op_kwargs"][0]
        settings = ctx.settings or self.frozen_settings(ctx)
        mask = kwargs.get("mask")
        self._check(input_, mask, kwargs)
        logits = widened(input_)
        scores = scores_of(logits, settings.score_function)
        with torch.no_grad():
            indices = choice(scores, self.score_correction_bias, settings)
        weights = weights_of(scores.gather(-1, indices), settings)
        tokens = counts(indices, settings.num_experts)
        losses, counted, number = [], None, count_tokens(logits, mask)
        if self.aux_loss:
            counted = tokens if mask is None else counts(indices, settings.num_experts, mask)
            _, probabilities = probabilities_of(scores, settings.score_function)
            sums = masked(probabilities, mask).reshape(-1, settings.num_experts).sum(0)
            losses.append((sums * counted).sum() * (settings.num_experts / number**2))
        if self.z_loss:
            losses.append(masked(logits.logsumexp(-1, keepdim=True), mask).square().sum() / number)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(input_, indices, counted, mask))
        return weights, [(indices, tokens, *losses)]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        if not ctx.needs.input:
            return None, [()], [()]
        input_, indices, counted, mask = ctx.saved_tensors
        settings = ctx.settings or self.frozen_settings(ctx)
        d_losses = [*basic_op_grad_extra_outputs[0]][2:]
        d_aux = d_losses.pop(0) if d_losses and self.aux_loss else None
        d_z = d_losses.pop(0) if d_losses else None

        logits = widened(input_)
        number = count_tokens(logits, mask)
        scores = scores_of(logits, settings.score_function)
        dw = weights_backward(grad_output.to(scores.dtype), scores.gather(-1, indices), settings)
        ds = torch.zeros_like(scores).scatter_(-1, indices, dw)
        if d_aux is not None:
            dp = masked(d_aux * (settings.num_experts / number**2) * counted, mask)
            total, probabilities = probabilities_of(scores, settings.score_function)
            ds += dp if total is None else quotient_backward(dp, probabilities, total)
        if settings.score_function == "softmax":
            dx = torch._softmax_backward_data(ds, scores, -1, scores.dtype)
        else:
            dx = ds * scores * (1 - scores)
        if d_z is not None:
            lse = logits.logsumexp(-1, keepdim=True)
            dx += d_z * (2 / number) * masked(lse, mask) * (logits - lse).exp()
        return dx.to(input_.dtype), [()], [()]

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
        chosen = torch.ones_like(logits[..., 0]) if mask is None else mask.to(logits.dtype)
        count = chosen.sum().clamp(min=1)
        one_hot = torch.zeros_like(logits).scatter(-1, indices, 1.0)
        counted = (one_hot * chosen.unsqueeze(-1)).reshape(-1, settings.num_experts).sum(0)
        if self.aux_loss:
            probabilities = scores
            if settings.score_function == "sigmoid":
                probabilities = scores / scores.sum(-1, keepdim=True)
            probabilities = probabilities * chosen.unsqueeze(-1)
            means = probabilities.reshape(-1, settings.num_experts).sum(0) / count
            out.append(settings.num_experts * (counted / count * means).sum())
        if self.z_loss:
            out.append((logits.logsumexp(-1).square() * chosen).sum() / count)
        return tuple(out)

    def _check(self, logits: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
        others = ", ".join(name for name in kwargs if name != "mask")
        if others:
            raise OpKwargsError(
                explain("The keyword of TopKRouter is mask", where="TopKRouter", received=others)
            )
        if logits.dtype not in COMPUTE_DTYPES:
            refuse_dtype(logits, self)
        if not logits.dim() or logits.shape[-1] != self.num_experts:
            raise InputError(
                explain(
                    f"Logits must be (..., {self.num_experts}), one for each expert",
                    where="TopKRouter",
                    received=f"input {tuple(logits.shape)}",
                )
            )
        if mask is not None and (mask.dtype is not torch.bool or mask.shape != logits.shape[:-1]):
            raise InputError(
                explain(
                    "The mask must be bool, of the logits' shape without the last dimension",
                    where="TopKRouter",
                    received=f"logits {tuple(logits.shape)}, mask {tuple(mask.shape)} of "
                    f"{mask.dtype}",
                )
            )

    def extra_repr(self) -> str:
        text = f"num_experts={self.num_experts}, top_k={self.top_k}"
        return f"{text}, score_function={self.score_function!r}"

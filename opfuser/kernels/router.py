"""The choice of experts for tokens, with weights and losses, in two launches; its gradient in one.

Dimensions: T tokens, E experts, k of each token. Logits are ``(…, E)``. ATen takes some thirty
launches for it: a router is bound by their number. Sums over tokens are those of programs, added up
in one order by the second launch: reproducible, without atomics.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import router_plain as plain
from .choice import kernel_or_plain
from .gated import readable
from .launch import Launch, multiprocessors
from .router_plain import LossGrads, RouterLosses, RouterSettings, Routing
from .tiling import cdiv, power_of_two, rows_of

__all__ = [
    "LossGrads",
    "RouterLosses",
    "RouterSettings",
    "Routing",
    "route",
    "route_backward",
]

_MAX_EXPERTS = 1024


@dataclass(frozen=True)
class _Tile:
    """Logits of a tile, and warps of its program."""

    logits: int
    warps: int


# 8 logits of a thread, which is one access of 16 bytes in bf16: with 16 of them threads of forward
# need up to 254 registers, and with 8 in four warps a few bytes spill. One warp alone adds up rows
# in registers.
_FORWARD, _BACKWARD = _Tile(512, 2), _Tile(256, 1)
# Of forward, on a multiprocessor: one alone adds up what all of them leave.
_PROGRAMS = 4
# Partial sums that it has under way.
_PARTS = 4096


def _width(settings: RouterSettings) -> tuple[int, int]:
    """Lanes for all groups, and for one."""
    groups = settings.num_groups
    size = power_of_two(settings.num_experts // groups)
    return power_of_two(groups) * size, size


@functools.lru_cache
def _forward_launches(settings: RouterSettings) -> tuple[Launch, Launch, int]:
    width, size = _width(settings)
    block, experts, k = max(1, _FORWARD.logits // width), settings.num_experts, settings.top_k
    constants = {
        "EXPERTS": experts,
        "GROUPS": settings.num_groups,
        "KEPT": settings.top_k_groups,
        "TOP_K": k,
        "SIGMOID": settings.score_function == "sigmoid",
        "NORM": settings.norm_topk_prob,
        "BLOCK": block,
        "WIDTH": width,
        "SIZE": size,
        "WIDTH_K": power_of_two(k),
    }
    narrow = power_of_two(experts)
    sizes = {"EXPERTS": experts, "TOP_K": k, "WIDTH": narrow, "PARTS": max(1, _PARTS // narrow)}
    last = Launch("router:statistics", {**sizes, "LONG": 256}, num_warps=8)
    return Launch("router:forward", constants, num_warps=_FORWARD.warps), last, block


@functools.lru_cache
def _backward_launch(settings: RouterSettings) -> tuple[Launch, int]:
    width = power_of_two(settings.num_experts)
    block = max(1, _BACKWARD.logits // width)
    constants = {
        "EXPERTS": settings.num_experts,
        "TOP_K": settings.top_k,
        "SIGMOID": settings.score_function == "sigmoid",
        "NORM": settings.norm_topk_prob,
        "BLOCK": block,
        "WIDTH": width,
    }
    return Launch("router:backward", constants, num_warps=_BACKWARD.warps), block


def _launch_forward(
    logits: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    settings: RouterSettings,
    losses: RouterLosses,
) -> Routing:
    first, last, block = _forward_launches(settings)
    *leading, experts = logits.shape
    tokens, k = logits.numel() // experts, settings.top_k
    programs = max(1, min(cdiv(tokens, block), _PROGRAMS * multiprocessors(logits)))

    def new(*shape: int, dtype: torch.dtype = torch.float32, wanted: bool = True) -> Any:
        return logits.new_empty(shape, dtype=dtype) if wanted else None

    int32, int64 = torch.int32, torch.int64
    balance, masked = losses.aux or losses.terms, mask is not None
    weights, indices = new(*leading, k), new(*leading, k, dtype=int64)
    parts = (
        new(programs, experts, dtype=int32),
        new(programs, experts, dtype=int32, wanted=masked),
        new(programs, experts, wanted=balance),
        new(programs, wanted=losses.z),
    )
    logits, stride = rows_of(logits)
    mask = None if mask is None else mask.contiguous()
    tensors = (logits, readable(bias), mask, weights, indices, *parts)
    first((programs, 1, 1), tensors, (tokens, stride), (settings.scaling_factor,))
    made = Routing(
        weights,
        indices,
        new(experts, dtype=int64),
        new(wanted=losses.aux),
        new(wanted=losses.z),
        new(2, experts, wanted=losses.terms),
        new(experts, wanted=balance),
        new(wanted=masked),
    )
    results = made.tokens, made.number, made.fractions, made.aux, made.z, made.terms
    last((1, 1, 1), (*parts, *results), (tokens, programs))
    return made


def _launch_backward(
    logits: Tensor,
    dweights: Tensor,
    routing: tuple[Tensor, Tensor | None, Tensor | None],
    mask: Tensor | None,
    grads: LossGrads,
    settings: RouterSettings,
) -> Tensor:
    launch, block = _backward_launch(settings)
    indices, fractions, number = routing
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    tokens = logits.numel() // settings.num_experts
    logits, stride = rows_of(logits)
    mask = None if mask is None else mask.contiguous()
    of_losses = (readable(grads.aux), readable(grads.z), readable(grads.terms))
    tensors = (logits, readable(dweights), indices, mask, number, fractions, *of_losses, dx)
    grid = (cdiv(tokens, block), 1, 1)
    launch(grid, tensors, (tokens, stride), (settings.scaling_factor,))
    return dx


def _takes(logits: Tensor, *others: Any) -> bool:
    settings = next(arg for arg in others if isinstance(arg, RouterSettings))
    return _width(settings)[0] <= _MAX_EXPERTS


route = kernel_or_plain(launch=_launch_forward, plain=plain.forward, accepts=_takes)
route_backward = kernel_or_plain(launch=_launch_backward, plain=plain.backward, accepts=_takes)

"""Launches of routers of models, and the bytes that they may move."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.router import LossGrads, RouterLosses, RouterSettings, route, route_backward
from tests.kernels.shipping import Family, empty

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = 16384
EVERY, NONE = RouterLosses(True, True, True), RouterLosses(False, False, False)


def forward(x: Tensor, *, settings: RouterSettings, masked: bool, losses: RouterLosses) -> object:
    bias = empty(settings.num_experts, dtype=FP32) if settings.num_groups > 1 else None
    mask = empty(len(x), dtype=torch.bool) if masked else None
    return route(x, bias, mask, settings, losses)


def backward(x: Tensor, *, settings: RouterSettings, masked: bool, losses: RouterLosses) -> object:
    dw, number = empty(len(x), settings.top_k, dtype=FP32), empty(1, dtype=FP32)
    indices, fractions = torch.empty_like(dw, dtype=torch.int64), empty(x.shape[1], dtype=FP32)
    terms = empty(2, x.shape[1], dtype=FP32)
    grads = LossGrads(*(t if on else None for t, on in zip((number, number, terms), losses)))
    mask = empty(len(x), dtype=torch.bool) if masked else None
    routing = indices, fractions, number if masked else None
    return route_backward(x, dw, routing, mask, grads, settings)


SHIPPED = Family()
for name, settings, dtype in (
    ("Mixtral", RouterSettings(8, 2, "softmax", True, 1.0, 1, 1), BF16),
    ("Qwen3", RouterSettings(128, 8, "softmax", True, 1.0, 1, 1), BF16),
    ("DeepSeek-V3", RouterSettings(256, 8, "sigmoid", True, 2.5, 8, 4), FP32),
    ("gpt-oss", RouterSettings(32, 4, "softmax", True, 1.0, 1, 1), BF16),
):
    x, k = empty(TOKENS, settings.num_experts, dtype=dtype), settings.top_k
    for kind, masked, losses in (("alone", False, NONE), ("with losses", True, EVERY)):
        # Partial sums of 528 programs are written and read.
        parts = 2 * 528 * 4 * (3 if masked else 1) * settings.num_experts
        chosen = TOKENS * (12 * k + masked)
        how = {"settings": settings, "masked": masked, "losses": losses}
        passes = 1 + (chosen + TOKENS * masked + parts) / x.nbytes
        SHIPPED.ship(f"{name} {kind}", passes, forward, x, **how)
        SHIPPED.ship(f"{name} backward {kind}", 2 + chosen / x.nbytes, backward, x, **how)

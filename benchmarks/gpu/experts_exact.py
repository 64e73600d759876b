"""The layer of experts in float64: what contestants are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.problem import Inputs

EPS = 1e-5


def in_float64(source: Any, top_k: int, inputs: Inputs) -> list[Tensor]:
    """The output of a layer, or block, and all gradients; one expert after the other.

    The gradients of a shared expert, in a layer, come last.

    Tokens go to the experts that they have in the dtype of the inputs: among equal logits, float64
    would choose others.
    """
    (x,), (dy,) = inputs
    parameters = [p for p in (source.norm, source.router) if p is not None]
    with torch.no_grad():
        logits = F.linear(normed(x, source.norm), source.router)
        chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1).indices
    wide = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    h = normed(wide[0], wide[1] if len(wide) == 3 else None)
    weights = F.linear(h, wide[-1]).gather(1, chosen).softmax(-1)
    y = torch.zeros_like(h)
    dh, dweights = torch.zeros_like(h), torch.zeros_like(weights)
    of_experts: list[list[Tensor]] = []
    for expert, (gate_up, down) in enumerate(zip(source.gate_up, source.down)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        own = [h[token], weights[token, place], gate_up, down]
        own = [t.detach().double().requires_grad_() for t in own]
        gate, up = F.linear(own[0], own[2]).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, own[3]) * own[1][:, None]
        dpart, dweights[token, place], *found = torch.autograd.grad(part, own, dy[token].double())
        y.index_add_(0, token, part.detach())
        dh.index_add_(0, token, dpart)
        of_experts.append([t.float() for t in found])
    dx, *others = torch.autograd.grad([h, weights], wide, [dh, dweights])
    of_shared: list[Tensor] = []
    if hasattr(source, "shared_down"):
        own = [x, source.shared_gate_up, source.shared_down]
        own = [t.detach().double().requires_grad_() for t in own]
        gate, up = F.linear(own[0], own[1]).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, own[2])
        dpart, *of_shared = torch.autograd.grad(part, own, dy.double())
        y, dx = y + part.detach(), dx + dpart
    if source.norm is not None:
        y, dx = x + y, dx + dy
    return [y.detach(), dx, *others, *map(torch.stack, zip(*of_experts)), *of_shared]


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else F.rms_norm(x, weight.shape, weight, EPS)

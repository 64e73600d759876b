"""The pre-norm layer of a GPT, with LayerNorm, biases and GELU by tanh, in torch.nn and opfuser.

The parameters of the two forms are in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import opfuser

from .torch_models import Attention, Residual

EPS = 1e-5


def torch_layer(
    dim: int, heads: int, norm: Callable[[], nn.Module], to: dict[str, Any], *, causal: bool = True
) -> list[nn.Module]:
    return [
        Residual(
            norm(),
            nn.Linear(dim, 3 * dim, **to),
            Attention(heads, heads, causal=causal),
            nn.Linear(dim, dim, **to),
        ),
        Residual(
            norm(),
            nn.Linear(dim, 4 * dim, **to),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * dim, dim, **to),
        ),
    ]


def our_layer(dim: int, heads: int, to: dict[str, Any], *, causal: bool = True) -> list[nn.Module]:
    return [
        opfuser.Residual(
            opfuser.LayerNorm(dim, eps=EPS, **to),
            opfuser.Linear(dim, 3 * dim, **to),
            opfuser.DotProductAttention(heads, causal=causal),
            opfuser.Linear(dim, dim, **to),
        ),
        opfuser.Residual(
            opfuser.LayerNorm(dim, eps=EPS, **to),
            opfuser.Linear(dim, 4 * dim, **to),
            opfuser.GELU(),
            opfuser.Linear(4 * dim, dim, **to),
        ),
    ]

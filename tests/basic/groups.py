"""What the tests of GroupedLinear share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser import GroupedLinear
from tests.basic.values import held_to

STACKED = pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])


def grouped(
    groups: int = 3, in_features: int = 5, out_features: int = 4, **kwargs: Any
) -> GroupedLinear:
    """One group after the other by torch is its reference from now on."""
    op = GroupedLinear(groups, in_features, out_features, **kwargs)
    for name, parameter in op.named_parameters():
        if name.startswith("bias"):
            nn.init.normal_(parameter)
    return held_to(op, a_linear_per_group)


def a_linear_per_group(op: GroupedLinear, x: Tensor, sizes: Tensor, *scales: Tensor) -> Tensor:
    lengths, p = sizes.tolist(), dict(op.named_parameters())
    groups = range(len(lengths))
    weights = p["weight"] if op.single_grouped_weight else [p[f"weight{g}"] for g in groups]
    weights = [w.t() if op.weight_transposed else w for w in weights]
    biases = p["bias"] if "bias" in p else [p.get(f"bias{g}") for g in groups]
    rows = x.reshape(-1, x.shape[-1]).split(lengths)
    if scales:
        of_rows = scales[0].reshape(-1, 1).split(lengths)
        parts = [F.linear(r, w) + s * b for r, w, b, s in zip(rows, weights, biases, of_rows)]
    else:
        parts = [F.linear(r, w, b) for r, w, b in zip(rows, weights, biases)]
    return torch.cat(parts).view(*x.shape[:-1], op.out_features)

"""The slopes of attention with linear biases."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(
    num_heads: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(H,): by how much a head's scores fall from one position to the next.

    Head i of n = 2^k has ``2 ** (-8 i / n)``. Heads beyond a power of two have every second slope
    of twice as many heads. Source: Press et al., "Train Short, Test Long", 2022, arXiv 2108.12409.
    """
    n = 1 << (num_heads.bit_length() - 1)
    i = torch.arange(num_heads, device=device, dtype=dtype)
    exponents = torch.where(i < n, (i + 1) * (-8 / n), (2 * (i - n) + 1) * (-4 / n))
    return torch.exp2(exponents)

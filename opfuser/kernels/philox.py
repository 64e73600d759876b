"""Seeds, and random words from a seed and a position in plain torch: those of ``device.philox``."""

from __future__ import annotations

import torch
from torch import Tensor

# What the device function calls ROUNDS.
_ROUNDS = 7
_WORD = 2**32 - 1


def draw_seed(x: Tensor) -> Tensor:
    """A seed from the generator of the device of x, without the host waiting for it."""
    return torch.randint(2**63 - 1, (1,), device=x.device)


def philox(seed: Tensor, c0: Tensor, c1: Tensor) -> list[Tensor]:
    """The four words of Philox4x32 at the counters (c0, c1, 0, 0), in int64.

    Args:
        seed: (1,), int64.
        c0, c1: int64, of shapes that broadcast to that of the words.
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = (
            _high(c2, 0xCD9E8D57) ^ c1 ^ k0,
            (c2 * 0xCD9E8D57) & _WORD,
            _high(c0, 0xD2511F53) ^ c3 ^ k1,
            (c0 * 0xD2511F53) & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def _high(a: Tensor, b: int) -> Tensor:
    """The upper 32 bits of the product of two such words, in 63 bits."""
    return (a * (b >> 16) + (a * (b & 0xFFFF) >> 16)) >> 16

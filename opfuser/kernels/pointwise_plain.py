"""Chains of element-wise stages in plain torch, and the random numbers of dropout.

Dimensions: R rows, which are all dimensions but the last, and C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .scalar import ScalarFunction, cast, wide_dtype

__all__ = [
    "ADD",
    "BIAS",
    "DROPOUT",
    "FUNCTION",
    "KEEP",
    "Scale",
    "Stage",
    "Wants",
    "backward",
    "forward",
]

FUNCTION, BIAS, ADD, DROPOUT, KEEP = range(5)

# What the device functions call ROUNDS.
_ROUNDS = 7
_WORD = 2**32 - 1


Wants = tuple[torch.dtype | bool, ...]


class Stage(NamedTuple):
    """One element-wise operation of a chain.

    Attributes:
        kind: FUNCTION; BIAS, ADD and DROPOUT, which have a tensor each: the bias, what is added,
            the seed; or KEEP, which in forward makes a copy for backward to go on from.
        device: the device function of a FUNCTION: ``"@module:name"`` below
            ``opfuser.kernels.device``, ``"module:name"`` elsewhere, or the Triton function itself.
        parameters: of the device function; of dropout the probability.
        function: what the device function computes, in torch.
        linear: whether the derivative is the same everywhere.
    """

    kind: int
    device: Any = None
    parameters: tuple[float, ...] = ()
    function: ScalarFunction | None = None
    linear: bool = True


class Scale(ScalarFunction):
    """``s x``."""

    name = "scale"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(x, self.factor, out=out)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(dy, self.factor, out=out)


def threshold(p: float) -> int:
    """Random words below it are those of zeroed elements."""
    return min(round(p * 2**32), _WORD)


def rescale(p: float) -> float:
    """The factor of the elements that dropout keeps."""
    return 1.0 / (1.0 - p) if p < 1 else 0.0


def survivors(like: Tensor, seed: Tensor, p: float) -> Tensor:
    """Which elements dropout keeps: the same that the kernels keep.

    Element (r, c) has word c % 4 of Philox4x32 at the counter (c // 4, r, 0, 0).
    """
    cols = like.shape[-1] if like.dim() else 1
    rows = like.numel() // max(cols, 1)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    c0 = torch.arange(-(-cols // 4), device=like.device)[None, :]
    c1 = torch.arange(rows, device=like.device)[:, None]
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = (
            _high(c2, 0xCD9E8D57) ^ c1 ^ k0,
            (c2 * 0xCD9E8D57) & _WORD,
            _high(c0, 0xD2511F53) ^ c3 ^ k1,
            (c0 * 0xD2511F53) & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    words = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1).flatten(1)[:, :cols]
    return (words >= threshold(p)).view(like.shape)


def _high(a: Tensor, b: int) -> Tensor:
    """Upper half of the product of two words of 32 bits, in 63."""
    return (a * (b >> 16) + (a * (b & 0xFFFF) >> 16)) >> 16


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """``x / (1 - p)`` where kept, else 0; contiguous."""
    return torch.where(survivors(x, seed, p), x.contiguous() * rescale(p), 0.0)


def _value(stage: Stage, z: Tensor, operand: Tensor | None, dtype: torch.dtype) -> Tensor:
    kind = stage.kind
    if kind == FUNCTION:
        assert stage.function is not None
        return cast(stage.function.value(cast(z, dtype)), dtype)
    if kind == DROPOUT:
        assert operand is not None
        return dropout(z, operand, stage.parameters[0])
    if kind == KEEP or operand is None:  # a bias that was cleared
        return z
    return z + (cast(operand, dtype) if kind == BIAS else operand)


def forward(
    stages: Sequence[Stage],
    x: Tensor,
    operands: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype],
) -> tuple[Tensor, list[Tensor | None]]:
    """As ``Chain.forward``."""
    kept: list[Tensor | None] = []
    for stage, operand, dtype in zip(stages, operands, dtypes):
        x = _value(stage, x, operand, dtype)
        kept.append(x if stage.kind == KEEP else None)
    return x.contiguous(), kept


def backward(
    stages: Sequence[Stage],
    dy: Tensor,
    x: Tensor | None,
    operands: Sequence[Tensor | None],
    wants: Wants,
    dtypes: Sequence[torch.dtype],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """As ``Chain.backward``."""
    inputs: list[Tensor | None] = []
    z = x
    for stage, operand, dtype in zip(stages, operands, dtypes):
        inputs.append(z)
        if stage.kind == KEEP:
            z = operand
        elif z is not None:
            z = _value(stage, z, operand, dtype)
    g = dy
    grads: list[Tensor | None] = [None] * len(stages)
    for i in reversed(range(len(stages))):
        stage, operand, z = stages[i], operands[i], inputs[i]
        if wants[i]:
            grads[i] = _sum(g, wants[i]) if stage.kind == BIAS else g
        if stage.kind == FUNCTION:
            assert stage.function is not None
            value = g if z is None else cast(z, dtypes[i])
            g = stage.function.backward(cast(g, dtypes[i]), value)
        elif stage.kind == DROPOUT:
            assert operand is not None
            g = dropout(g, operand, stage.parameters[0])
    return g if wants[-1] else None, grads


def _sum(g: Tensor, dtype: Any) -> Tensor:
    """Over all dimensions but the last, in memory of its own."""
    dims = tuple(range(g.dim() - 1))
    return cast(g.sum(dims, dtype=wide_dtype(g.dtype)) if dims else g.clone(), dtype)

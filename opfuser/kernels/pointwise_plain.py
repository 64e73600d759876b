"""Chains of element-wise operations in plain torch, and the random numbers of dropout.

Dimensions: R rows, which are all dimensions but the last, and C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .philox import philox
from .scalar import ScalarFunction, cast, wide_dtype

FUNCTION, BIAS, ADD, DROPOUT, KEEP = range(5)

_WORD = 2**32 - 1


Wants = tuple[torch.dtype | bool, ...]


class Link(NamedTuple):
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


class ChainResult(NamedTuple):
    """What forward returns.

    Attributes:
        y: the result of the last link, contiguous.
        kept: for each KEEP what it kept, contiguous, for any other link None.
    """

    y: Tensor
    kept: list[Tensor | None]


class ChainGrads(NamedTuple):
    """What backward returns, None where it was not wanted.

    Attributes:
        dx: the gradient of the input.
        operands: for each link that of its operand. That of a bias has memory of its own and is
            summed in fp32 or wider; others may be one tensor, or the gradient of the output.
    """

    dx: Tensor | None
    operands: list[Tensor | None]


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
    c0 = torch.arange(-(-cols // 4), device=like.device)[None, :]
    c1 = torch.arange(rows, device=like.device)[:, None]
    words = torch.stack(philox(seed, c0, c1), -1).flatten(1)[:, :cols]
    return (words >= threshold(p)).view(like.shape)


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """``x / (1 - p)`` where kept, else 0; contiguous."""
    return torch.where(survivors(x, seed, p), x.contiguous() * rescale(p), 0.0)


def _value(link: Link, z: Tensor, operand: Tensor | None, dtype: torch.dtype) -> Tensor:
    kind = link.kind
    if kind == FUNCTION:
        assert link.function is not None
        return cast(link.function.value(cast(z, dtype)), dtype)
    if kind == DROPOUT:
        assert operand is not None
        return dropout(z, operand, link.parameters[0])
    if kind == KEEP or operand is None:  # a bias that was cleared
        return z
    return z + (cast(operand, dtype) if kind == BIAS else operand)


def forward(
    links: Sequence[Link],
    x: Tensor,
    operands: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype],
) -> ChainResult:
    """As ``Chain.forward``."""
    kept: list[Tensor | None] = []
    for link, operand, dtype in zip(links, operands, dtypes):
        x = _value(link, x, operand, dtype)
        kept.append(x if link.kind == KEEP else None)
    return ChainResult(x.contiguous(), kept)


def backward(
    links: Sequence[Link],
    dy: Tensor,
    x: Tensor | None,
    operands: Sequence[Tensor | None],
    wants: Wants,
    dtypes: Sequence[torch.dtype],
) -> ChainGrads:
    """As ``Chain.backward``."""
    inputs: list[Tensor | None] = []
    z = x
    for link, operand, dtype in zip(links, operands, dtypes):
        inputs.append(z)
        if link.kind == KEEP:
            z = operand
        elif z is not None:
            z = _value(link, z, operand, dtype)
    g = dy
    grads: list[Tensor | None] = [None] * len(links)
    for i in reversed(range(len(links))):
        link, operand, z = links[i], operands[i], inputs[i]
        if wants[i]:
            grads[i] = _sum(g, wants[i]) if link.kind == BIAS else g
        if link.kind == FUNCTION:
            assert link.function is not None
            value = g if z is None else cast(z, dtypes[i])
            g = link.function.backward(cast(g, dtypes[i]), value)
        elif link.kind == DROPOUT:
            assert operand is not None
            g = dropout(g, operand, link.parameters[0])
    return ChainGrads(g if wants[-1] else None, grads)


def _sum(g: Tensor, dtype: Any) -> Tensor:
    """Over all dimensions but the last, in memory of its own."""
    dims = tuple(range(g.dim() - 1))
    return cast(g.sum(dims, dtype=wide_dtype(g.dtype)) if dims else g.clone(), dtype)

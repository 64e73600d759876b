"""Modules for what is no operation of opfuser, and what its operations are given."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import NotSupportedError, explain

__all__ = ["Child", "ColumnScale", "LayerCache", "Reorder", "Transpose"]


class Child(nn.Module):
    """A child that is called as it is, and returns rows of as many features as in the trace.

    Hooks, and subclasses of tensors, may make something else of that.

    Raises:
        NotSupportedError: they do.
    """

    def __init__(self, child: nn.Module, features: int) -> None:
        super().__init__()
        self.child, self.features = child, features

    def forward(self, x: Tensor) -> Tensor:
        """What the child returns."""
        y = self.child(x)
        if type(y) is not Tensor or y.shape != (*x.shape[:-1], self.features):
            got = type(y).__name__ + (f" of {tuple(y.shape)}" if isinstance(y, Tensor) else "")
            raise NotSupportedError(
                explain(
                    "A child with hooks or tensors of its own returns what its forward would",
                    where=f"a {type(self.child).__name__}, in a model after opfuser.apply",
                    received=f"{got} for an input of {tuple(x.shape)}",
                    remedy="Apply after hooks are registered, or call opfuser.revert(model)",
                )
            )
        return y


class LayerCache(NamedTuple):
    """One layer of a cache.

    Attributes:
        cache: of all layers.
        layer: its number.
        causal: whether query i sees the keys up to i: then no others than the first are seen.
    """

    cache: Any
    layer: int
    causal: bool

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values, and returns those that may be attended to."""
        length = k.shape[2]
        k, v = self.cache.update(k, v, self.layer)
        return (k[:, :, :length], v[:, :, :length]) if self.causal else (k, v)


class Reorder(nn.Module):
    """Blocks of the last dimension in another order."""

    def __init__(self, blocks: tuple[int, ...], size: int) -> None:
        super().__init__()
        self.size = size
        self.blocks = list(blocks)
        rows = blocks.index(1) if 1 in blocks else len(blocks)
        numbers = torch.arange(len(blocks))
        regular = len(blocks) % rows == 0 and numbers.view(rows, -1).T.flatten().tolist()
        self.rows = rows if regular == self.blocks else 0
        """Of the table of blocks whose columns stand one behind another in the output."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, copied in order."""
        if self.rows:
            table: Tensor = x.unflatten(-1, (self.rows, -1, self.size))
            return table.transpose(-3, -2).flatten(-3)
        whole: Tensor = x.unflatten(-1, (-1, self.size))
        return whole[..., self.blocks, :].flatten(-2)


class ColumnScale(nn.Module):
    """The product with a parameter that has a number for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """The input, scaled."""
        return x * self.weight.to(x.dtype)


class Transpose(nn.Module):
    """The first two dimensions exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, in another order."""
        return x.transpose(0, 1).contiguous()

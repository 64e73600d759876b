"""Modules for what is no operation of opfuser, and what its operations are given."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .dataflow import map_leaves

__all__ = ["ColumnScale", "Item", "LayerCache", "Reorder", "Routed", "RowScale", "Transpose"]


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


class Routed(nn.Module):
    """Experts, and the router that chooses them.

    Args:
        router: returns weights and experts of rows, among other tensors.
        experts: a sequence that takes rows, the experts of each, and their weights.
        weights, indices: their places among the tensors that the router returns.
        flat: whether the router takes a matrix of rows.
    """

    def __init__(
        self, router: nn.Module, experts: nn.Module, weights: int, indices: int, flat: bool
    ) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.weights, self.indices, self.flat = weights, indices, flat

    def forward(self, x: Tensor) -> Tensor:
        """What the experts of each row compute, weighted and summed."""
        rows = x.reshape(-1, x.shape[-1])
        found = _tensors_in(self.router(rows if self.flat else x))
        weights, indices = (found[n].reshape(len(rows), -1) for n in (self.weights, self.indices))
        y: Tensor = self.experts(rows, indices, weights)
        return y.view(x.shape)


class Item(nn.Module):
    """One of the tensors that a module returns, which may have lost the shape of the input.

    Args:
        inner: the module.
        number: the place of the tensor.
    """

    def __init__(self, inner: nn.Module, number: int) -> None:
        super().__init__()
        self.inner, self.number = inner, number

    def forward(self, x: Tensor) -> Tensor:
        """The tensor that it returns there for an input, in rows as those of the input."""
        y: Tensor = _tensors_in(self.inner(x))[self.number]
        return y.reshape(*x.shape[:-1], y.shape[-1])


class RowScale(nn.Module):
    """The product of what two modules compute, of which the first has one column."""

    def __init__(self, scale: nn.Module, branch: nn.Module) -> None:
        super().__init__()
        self.scale, self.branch = scale, branch

    def forward(self, x: Tensor) -> Tensor:
        """The product for an input."""
        y: Tensor = self.branch(x) * self.scale(x)
        return y


def _tensors_in(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return found

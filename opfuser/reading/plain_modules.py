"""Modules for what is no operation of opfuser."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ColumnScale", "Reorder", "Transpose"]


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

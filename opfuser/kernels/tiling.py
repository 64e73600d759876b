"""How tensors are cut into tiles of rows and columns, and tiles given to programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .launch import Launch, multiprocessors


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """``x`` with adjacent columns, and the distance between rows; copied only if it has to be."""
    if x.is_contiguous():
        return x, x.shape[-1] if x.dim() else 1
    if x.dim() > 2:
        x = x.flatten(0, -2)
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
        return x, x.shape[-1]
    return x, x.stride(0)


def empty_contiguous(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a contiguous result in the shape of x, and in its dtype if none is given.

    A microsecond less than from ``x.shape``, whose integers torch unpacks one by one; and another
    half where nothing is said of dtype and layout.
    """
    if (dtype is None or dtype == x.dtype) and x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def tile(cols: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a tile of that many elements.

    The columns are the largest power of two that divides ``cols``, so that no lane is idle at the
    end of a row: 512 for 3584; but at least 128, or all.
    """
    most = max(128, min(elements, cols & -cols))
    block_cols = min(most, 1 << (max(cols, 1) - 1).bit_length())
    return max(1, elements // block_cols), block_cols


@dataclass(frozen=True)
class TiledLaunch:
    """A launch, and the tile that a program works on at a time.

    Attributes:
        launch: what runs.
        block_rows: rows of a tile.
        block_cols: columns of a tile.
        programs: how many a multiprocessor gets at most, where a program takes several tiles.
        min_rows: rows that a program takes at least.
    """

    launch: Launch
    block_rows: int
    block_cols: int
    programs: int = 1
    min_rows: int = 1

    def tiles(self, rows: int, cols: int) -> int:
        """How many there are: programs, if each takes one."""
        return cdiv(rows, self.block_rows) * cdiv(cols, self.block_cols)

    def slices(self, x: Tensor, rows: int, cols: int) -> tuple[int, int]:
        """Blocks of columns, and how many programs share the rows of each.

        Slice s of S takes every S-th tile from the s-th, so that all programs together move along
        the tensors.
        """
        blocks = cdiv(cols, self.block_cols)
        programs = multiprocessors(x) * self.programs // max(1, blocks)
        slices = min(cdiv(rows, max(self.min_rows, self.block_rows)), programs)
        return blocks, max(1, slices)


@dataclass(frozen=True)
class TileRule:
    """How a family of kernels chooses its tiles.

    Attributes:
        tile_bytes: of one operand in a tile. A thread accesses 16 at once.
        warps: of a program.
        max_cols: columns of a tile at most; None is no limit.
        programs: as in :class:`TiledLaunch`.
        min_rows: as in :class:`TiledLaunch`.
        ahead: how many tiles a program that takes several has under way, the constant AHEAD; 1
            fetches none before it is needed. None where a program takes one tile.
    """

    tile_bytes: int
    warps: int = 4
    max_cols: int | None = None
    programs: int = 1
    min_rows: int = 1
    ahead: int | None = None

    def launch(
        self, function: str, constants: dict[str, Any], cols: int, itemsize: int, min_cols: int = 1
    ) -> TiledLaunch:
        """The launch of a function for rows of ``cols`` columns.

        Args:
            constants: those of its constants that do not follow from the rule.
            min_cols: columns of a tile at least.
        """
        elements = self.tile_bytes // itemsize
        if self.max_cols is not None:
            cols = min(cols, self.max_cols)
        block_cols = max(min_cols, tile(cols, elements)[1])
        block_rows = max(1, elements // block_cols)
        constants = {**constants, "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}
        if self.ahead is not None:
            constants["AHEAD"] = self.ahead
        launch = Launch(function, constants, num_warps=self.warps)
        return TiledLaunch(launch, block_rows, block_cols, self.programs, self.min_rows)

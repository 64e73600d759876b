"""The last step of sums over rows: partial sums, which programs left behind, added up."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .launch import Launch
from .tiling import TiledLaunch, cdiv


@dataclass(frozen=True)
class _Tile:
    """Rows and columns of a program at a time, and its warps."""

    rows: int
    cols: int
    warps: int


# Many programs, few steps. On an H200, 264 rows of 4096 columns take 3.4 us, with tiles of 32
# columns 3.6.
_WIDE = _Tile(128, 16, 4)
# Of few columns there are few programs: 4224 rows of 128 take 5.8 us with tall tiles and 14.5 us
# with the others, 528 of 1024 take 3.3 and 3.8.
_TALL = _Tile(512, 8, 8)
_FEW_COLS = 2**10


def sum_columns(parts: Tensor, totals: Sequence[Tensor], counts: Sequence[int]) -> None:
    """Fills in sums of columns.

    Args:
        parts: partial sums in fp32, C columns in the last dimension, rows in all others.
        totals: (C,), one or two.
        counts: how many of the rows, in order, belong to each.
    """
    cols = parts.shape[-1]
    tiled = _launch(cols)
    first, second = (*totals, None)[:2]
    assert first is not None
    rows = (*counts, 0)[:2]
    grid = cdiv(cols, tiled.block_cols), len(totals), 1
    tiled.launch(grid, (parts, first, second), (*rows, cols))


@functools.cache
def _launch(cols: int) -> TiledLaunch:
    tile = _TALL if cols <= _FEW_COLS else _WIDE
    sizes = {"BLOCK_ROWS": tile.rows, "BLOCK_COLS": tile.cols}
    launch = Launch("column_sums:column_sums", sizes, num_warps=tile.warps)
    return TiledLaunch(launch, tile.rows, tile.cols)

"""What programs that share the rows of a tensor found, added up in one order: the same every time.

Dimensions: M and N rows of partial sums, C columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_sums(
    parts_ptr, first_ptr, second_ptr,
    first_rows, second_rows, cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Sums of the columns of parts (M + N, C), or zeros where there are no rows.

    Those of the first M rows go to first (C,); those of the N others, by programs that are second
    along the second axis of the grid, to second (C,).
    """
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    is_second = tl.program_id(1) == 1
    start = tl.where(is_second, first_rows, 0)
    stop = tl.where(is_second, first_rows + second_rows, first_rows)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for first in range(start, stop, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        mask = (row < stop)[:, None] & (col < cols)[None, :]
        at = parts_ptr + row.to(tl.int64)[:, None] * cols + col[None, :]
        total += tl.load(at, mask=mask, other=0.0)
    sums = tl.sum(total, axis=0)
    if is_second:
        if second_ptr is not None:
            tl.store(second_ptr + col, sums, mask=col < cols)
    else:
        tl.store(first_ptr + col, sums, mask=col < cols)

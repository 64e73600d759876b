"""Chains of element-wise stages: all of them at once on a tile, and their gradients.

Dimensions: R rows, C columns, S slices of the rows, B biases. x, y, dy and operands that are added,
kept or made: (R, C), contiguous; a bias: (C,); sums: (B, S, C); a seed: (1,).

``STAGES`` is a tuple of stages, each a tuple ``(kind, operand, result, function, *parameters)``:

    FUNCTION    z -> f(z): ``function(z, parameters)`` is the pair (value, derivative)
    BIAS        z -> z + b; result: which of the sums is that of its gradient
    ADD         z -> z + e; result: the operand that takes the gradient of e
    DROPOUT     z -> z / (1 - p), or 0; parameters: p in units of 2⁻³², and 1 / (1 - p)
    KEEP        z -> z; forward stores z, backward takes it from there

``operand`` and ``result`` count from 0, a negative one is none. Kernels take up to eight operands.
All arithmetic is fp32. Backward makes the values that it needs again, from x or from what was kept.
"""

# ruff: noqa: RUF005 - Triton has no starred expressions

from __future__ import annotations

import triton
import triton.language as tl

from .scalar import chain

FUNCTION = tl.constexpr(0)
BIAS = tl.constexpr(1)
ADD = tl.constexpr(2)
DROPOUT = tl.constexpr(3)
KEEP = tl.constexpr(4)

# With seven rounds Philox4x32 passes all tests of BigCrush (Salmon et al., "Parallel Random
# Numbers: As Easy as 1, 2, 3", 2011). They take 13 integer operations per element; an H200 has time
# for 18 while it moves the 6 bytes of dropout and add in bf16.
ROUNDS = tl.constexpr(7)


@triton.jit
def scale(x, P: tl.constexpr):
    """``P[0] x``."""
    return x * P[0], tl.full(x.shape, P[0], tl.float32)


@triton.jit
def survivors(
    seed_ptr,
    first_row,
    first_col,
    THRESHOLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Which elements of a tile dropout keeps. ``first_col`` and BLOCK_COLS are multiples of four.

    Element (r, c) has word c % 4 of Philox at the counter (c // 4, r, 0, 0): four elements share
    the work, and tiles of any size see the same numbers.
    """
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    group = first_col // 4 + tl.arange(0, BLOCK_COLS // 4)[None, :]
    zero = tl.zeros((BLOCK_ROWS, BLOCK_COLS // 4), tl.uint32)
    c0, c1 = zero + group.to(tl.uint32), zero + row.to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed_ptr), c0, c1, zero, zero, ROUNDS)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK_ROWS, BLOCK_COLS))
    return words >= THRESHOLD


@triton.jit
def place(first_row, first_col, rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Offset of a tile's first element, offsets of all from there, and which of them exist."""
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    base = tl.cast(first_row, tl.int64) * cols + first_col
    return base, row * cols + col, (row < rows - first_row) & (col < cols - first_col)


@triton.jit
def apply(
    z,
    operands,
    first_row,
    first_col,
    rows,
    cols,
    STAGES: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Runs the stages on a tile of values in fp32.

    Returns the values, and the tuple of the derivatives of all stages, for ``pull_back``.
    """
    tile = place(first_row, first_col, rows, cols, BLOCK_ROWS, BLOCK_COLS)
    derivatives = ()
    for i in tl.static_range(len(STAGES)):
        z, derivative = _stage(
            z, operands, first_row, first_col, tile, i, STAGES, BACKWARD, BLOCK_ROWS, BLOCK_COLS
        )
        derivatives = derivatives + (derivative,)  # type: ignore[assignment]
    return z, derivatives


@triton.jit
def _stage(
    z,
    operands,
    first_row,
    first_col,
    tile,
    INDEX: tl.constexpr,
    STAGES: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    base, at, inside = tile
    derivative = 1.0
    if STAGES[INDEX][0] == FUNCTION:
        # Passed as they are, elements of a nested tuple break Triton 3.6 and 3.7.
        P: tl.constexpr = STAGES[INDEX][4:]
        z, derivative = STAGES[INDEX][3](z, P)
    elif STAGES[INDEX][0] == DROPOUT:
        seed_ptr = operands[STAGES[INDEX][1]]
        stay = survivors(seed_ptr, first_row, first_col, STAGES[INDEX][4], BLOCK_ROWS, BLOCK_COLS)
        derivative = tl.where(stay, STAGES[INDEX][5], 0.0)
        z = tl.where(stay, z * STAGES[INDEX][5], 0.0)
    elif STAGES[INDEX][1] >= 0:
        pointer = operands[STAGES[INDEX][1]]
        if STAGES[INDEX][0] == BIAS:
            # In the shape of the tile: for each of its rows a thread reads the bias from the cache,
            # where one row of it would travel through shared memory.
            col = (
                first_col + tl.zeros((BLOCK_ROWS, 1), tl.int32) + tl.arange(0, BLOCK_COLS)[None, :]
            )
            z += tl.load(pointer + col, mask=inside, other=0.0).to(tl.float32)
        elif STAGES[INDEX][0] == ADD:
            z += tl.load(pointer + base + at, mask=inside, other=0.0).to(tl.float32)
        elif BACKWARD:
            z = tl.load(pointer + base + at, mask=inside, other=0.0).to(tl.float32)
        else:
            tl.store(pointer + base + at, z, mask=inside)
    return z, derivative


@triton.jit
def pull_back(g, derivatives, sums, operands, tile, STAGES: tl.constexpr):
    """Takes g, the gradient of what ``apply`` returns, back to its input.

    Stores the gradients of what was added, and adds those of biases to ``sums``, a tuple of tiles.
    """
    base, at, inside = tile
    new = ()
    for j in tl.static_range(len(STAGES)):
        if STAGES[len(STAGES) - 1 - j][2] >= 0:
            if STAGES[len(STAGES) - 1 - j][0] == BIAS:
                new = new + (sums[len(new)] + g,)  # type: ignore[assignment]
            else:
                pointer = operands[STAGES[len(STAGES) - 1 - j][2]]
                tl.store(pointer + base + at, g, mask=inside)
        if STAGES[len(STAGES) - 1 - j][0] == FUNCTION or STAGES[len(STAGES) - 1 - j][0] == DROPOUT:
            g = chain(g, derivatives[len(STAGES) - 1 - j])
    return g, new


@triton.jit
def chain_forward(
    x_ptr, y_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr,
    rows, cols,
    STAGES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A chain's output y, a tile per program; tiles along a row are neighbours."""
    operands = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr)
    blocks = tl.cdiv(cols, BLOCK_COLS)
    first_row = tl.program_id(0) // blocks * BLOCK_ROWS
    first_col = tl.program_id(0) % blocks * BLOCK_COLS
    base, at, inside = place(first_row, first_col, rows, cols, BLOCK_ROWS, BLOCK_COLS)
    x = tl.load(x_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
    y, _derivatives = apply(
        x, operands, first_row, first_col, rows, cols, STAGES, False, BLOCK_ROWS, BLOCK_COLS
    )
    tl.store(y_ptr + base + at, y, mask=inside)


@triton.jit
def chain_backward(
    dy_ptr, x_ptr, sums_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr,
    rows, cols, slices,
    STAGES: tl.constexpr, BIASES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """A chain's gradients, in operands; x_ptr is None where no value of the first stages is needed.

    That of its input is the gradient of an ADD without operand that comes first. A program walks
    down a block of columns: slice s of the rows is every S-th tile from the s-th, so that all
    programs together move along the tensors.
    """
    operands = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr)
    blocks = tl.cdiv(cols, BLOCK_COLS)
    part = tl.program_id(0) // blocks
    first_col = tl.program_id(0) % blocks * BLOCK_COLS
    sums = ()
    for _i in tl.static_range(BIASES):
        sums = sums + (tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32),)  # type: ignore[assignment]
    for first_row in range(part * BLOCK_ROWS, rows, slices * BLOCK_ROWS):
        tile = place(first_row, first_col, rows, cols, BLOCK_ROWS, BLOCK_COLS)
        base, at, inside = tile
        g = tl.load(dy_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        if x_ptr is None:
            z = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        else:
            z = tl.load(x_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        _z, derivatives = apply(
            z, operands, first_row, first_col, rows, cols, STAGES, True, BLOCK_ROWS, BLOCK_COLS
        )
        _g, sums = pull_back(g, derivatives, sums, operands, tile, STAGES)
    col = first_col + tl.arange(0, BLOCK_COLS)
    for i in tl.static_range(BIASES):
        at_sum = (i * slices + part).to(tl.int64) * cols + col
        tl.store(sums_ptr + at_sum, tl.sum(sums[i], axis=0), mask=col < cols)

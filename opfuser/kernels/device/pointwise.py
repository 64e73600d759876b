"""Chains of element-wise operations: all of them at once on a tile, and their gradients.

Dimensions: R rows, C columns, S slices of the rows, B biases. x, y, dy and operands that are added,
kept or made: (R, C), contiguous; a bias: (C,); sums: (B, S, C); a seed: (1,).

``LINKS`` holds them in order, each as a tuple ``(kind, operand, result, function, *parameters)``:

    FUNCTION    z -> f(z): ``function(z, parameters)`` is the pair (value, derivative)
    BIAS        z -> z + b; result: which of the sums is that of its gradient
    ADD         z -> z + e; result: the operand that takes the gradient of e
    DROPOUT     z -> z / (1 - p), or 0; parameters: p in units of 2⁻³², and 1 / (1 - p)
    KEEP        z -> z; forward stores z, backward takes it from there

``operand`` and ``result`` count from 0, a negative one is none. Kernels take up to eight operands.
All arithmetic is fp32. Backward recomputes the values that it needs, from x or from what was kept.
"""

# ruff: noqa: RUF005 - Triton has no starred expressions

from __future__ import annotations

import triton
import triton.language as tl

from .philox import philox
from .scalar import chain
from .store import store_tile

FUNCTION = tl.constexpr(0)
BIAS = tl.constexpr(1)
ADD = tl.constexpr(2)
DROPOUT = tl.constexpr(3)
KEEP = tl.constexpr(4)


@triton.jit
def survivors(
    seed, first_row, first_col,
    THRESHOLD: tl.constexpr, EIGHT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Which elements of a tile dropout keeps. ``first_col`` and BLOCK_COLS are multiples of four.

    Element (r, c) has word c % 4 of Philox at the counter (c // 4, r, 0, 0): four elements share
    the work, and tiles of any size see the same numbers.
    """
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    if EIGHT:
        # Threads hold eight neighbors of a row of half precision: as many numbers are to be there.
        group = first_col // 4 + 2 * tl.arange(0, BLOCK_COLS // 8)[None, :]
        zero = tl.zeros((BLOCK_ROWS, BLOCK_COLS // 8), tl.uint32)
        c0, c1 = zero + group.to(tl.uint32), zero + row.to(tl.uint32)
        a, b, c, d = philox(seed, c0, c1)
        e, f, g, h = philox(seed, c0 + 1, c1)
        a, b, c, d = tl.join(a, e), tl.join(b, f), tl.join(c, g), tl.join(d, h)
    else:
        group = first_col // 4 + tl.arange(0, BLOCK_COLS // 4)[None, :]
        zero = tl.zeros((BLOCK_ROWS, BLOCK_COLS // 4), tl.uint32)
        a, b, c, d = philox(seed, zero + group.to(tl.uint32), zero + row.to(tl.uint32))
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
def common(operands, first_col, cols, LINKS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """For each link what all rows share: its bias, in fp32, or its seed."""
    col = first_col + tl.arange(0, BLOCK_COLS)
    shared = ()
    for i in tl.static_range(len(LINKS)):
        value = 0.0
        if LINKS[i][1] >= 0:
            if LINKS[i][0] == BIAS:
                value = tl.load(operands[LINKS[i][1]] + col, mask=col < cols, other=0.0)
                value = value.to(tl.float32)[None, :]
            elif LINKS[i][0] == DROPOUT:
                value = tl.load(operands[LINKS[i][1]])
        shared = shared + (value,)  # type: ignore[assignment]
    return shared


@triton.jit
def apply(
    z, operands, shared, first_row, first_col, tile,
    LINKS: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The result of the links on a tile of values in fp32.

    Returns the values, and for ``pull_back`` a tuple: the derivatives of functions, and which
    elements dropouts keep.
    """
    derivatives = ()
    for i in tl.static_range(len(LINKS)):
        z, derivative = _link(
            z, operands, shared[i], first_row, first_col, tile,
            i, LINKS, BACKWARD, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        derivatives = derivatives + (derivative,)  # type: ignore[assignment]
    return z, derivatives


@triton.jit
def _link(
    z, operands, shared, first_row, first_col, tile,
    INDEX: tl.constexpr, LINKS: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    base, at, inside = tile
    derivative = 1.0
    if LINKS[INDEX][0] == FUNCTION:
        # Passed as they are, elements of a nested tuple break Triton 3.6 and 3.7.
        P: tl.constexpr = LINKS[INDEX][4:]
        z, derivative = LINKS[INDEX][3](z, P)
    elif LINKS[INDEX][0] == DROPOUT:
        derivative = survivors(
            shared, first_row, first_col,
            LINKS[INDEX][4], LINKS[INDEX][6], BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        z = tl.where(derivative, z * LINKS[INDEX][5], 0.0)
    elif LINKS[INDEX][1] >= 0:
        pointer = operands[LINKS[INDEX][1]]
        if LINKS[INDEX][0] == BIAS:
            z += shared
        elif LINKS[INDEX][0] == ADD:
            z += tl.load(pointer + base + at, mask=inside, other=0.0).to(tl.float32)
        elif BACKWARD:
            z = tl.load(pointer + base + at, mask=inside, other=0.0).to(tl.float32)
        else:
            store_tile(pointer, tile, z)
    return z, derivative


@triton.jit
def pull_back(g, derivatives, sums, operands, tile, LINKS: tl.constexpr):
    """Takes g, the gradient of what ``apply`` returns, back to its input.

    Stores the gradients of what was added, and adds those of biases to ``sums``, a tuple of tiles.
    """
    new = ()
    for j in tl.static_range(len(LINKS)):
        if LINKS[len(LINKS) - 1 - j][2] >= 0:
            if LINKS[len(LINKS) - 1 - j][0] == BIAS:
                new = new + (sums[len(new)] + g,)  # type: ignore[assignment]
            else:
                store_tile(operands[LINKS[len(LINKS) - 1 - j][2]], tile, g)
        if LINKS[len(LINKS) - 1 - j][0] == FUNCTION:
            g = chain(g, derivatives[len(LINKS) - 1 - j])
        elif LINKS[len(LINKS) - 1 - j][0] == DROPOUT:
            stay = derivatives[len(LINKS) - 1 - j]
            g = tl.where(stay, g * LINKS[len(LINKS) - 1 - j][5], 0.0)
    return g, new


@triton.jit
def chain_forward(
    x_ptr, y_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr,
    rows, cols, slices,
    LINKS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A chain's output y, by programs that share the rows as those of ``chain_backward`` do."""
    operands = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr)
    blocks = tl.cdiv(cols, BLOCK_COLS)
    part = tl.program_id(0) // blocks
    first_col = tl.program_id(0) % blocks * BLOCK_COLS
    shared = common(operands, first_col, cols, LINKS, BLOCK_COLS)
    step = slices * BLOCK_ROWS
    for first_row in tl.range(part * BLOCK_ROWS, rows, step, num_stages=AHEAD):
        tile = place(first_row, first_col, rows, cols, BLOCK_ROWS, BLOCK_COLS)
        base, at, inside = tile
        x = tl.load(x_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        y, _derivatives = apply(
            x, operands, shared, first_row, first_col, tile,
            LINKS, False, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        store_tile(y_ptr, tile, y)


@triton.jit
def chain_backward(
    dy_ptr, x_ptr, sums_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr,
    rows, cols, slices,
    LINKS: tl.constexpr, BIASES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A chain's gradients, in operands; x_ptr is None where no value of the first links is needed.

    That of its input is the gradient of an ADD without operand that comes first. A program takes
    one block of columns, and in it slice s of the rows: every S-th tile from the s-th, so that all
    programs together move along the tensors.
    """
    operands = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr)
    blocks = tl.cdiv(cols, BLOCK_COLS)
    part = tl.program_id(0) // blocks
    first_col = tl.program_id(0) % blocks * BLOCK_COLS
    shared = common(operands, first_col, cols, LINKS, BLOCK_COLS)
    sums = ()
    for _i in tl.static_range(BIASES):
        sums = sums + (tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32),)  # type: ignore[assignment]
    step = slices * BLOCK_ROWS
    for first_row in tl.range(part * BLOCK_ROWS, rows, step, num_stages=AHEAD):
        tile = place(first_row, first_col, rows, cols, BLOCK_ROWS, BLOCK_COLS)
        base, at, inside = tile
        g = tl.load(dy_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        if x_ptr is None:
            z = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        else:
            z = tl.load(x_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
        _z, derivatives = apply(
            z, operands, shared, first_row, first_col, tile,
            LINKS, True, BLOCK_ROWS, BLOCK_COLS,
        )  # fmt: skip
        _g, sums = pull_back(g, derivatives, sums, operands, tile, LINKS)
    col = first_col + tl.arange(0, BLOCK_COLS)
    for i in tl.static_range(BIASES):
        at_sum = (i * slices + part).to(tl.int64) * cols + col
        tl.store(sums_ptr + at_sum, tl.sum(sums[i], axis=0), mask=col < cols)

"""Cross entropy of rows of any length.

Dimensions: V columns (``cols``), of which a program takes TILE at a time, as
(TILE / VEC, VEC): VEC entries are 16 bytes, and belong to one thread.

The largest entry and the sum of exponentials are kept per thread: one exponential per entry and
one per VEC entries, to rescale the sum, and no barrier until the row ends. Two exponentials per
entry, or a barrier per tile, and not the memory would be the limit: at 4.8 TB/s an H200 reads
2.4e12 logits in half precision per second, and its special function units do 3.7e12 exponentials.

A row of odd length, or one behind such a row, begins and ends anywhere between 16-byte boundaries:
the tiles cover the whole vectors in between, and up to VEC - 1 entries at both ends are taken
together as a small tile of their own, unless EVEN says that there are none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .store import store_flat

# The lowest fp32 number rather than -inf, so that differences to it are never nan.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _row(row, stride, cols, EVEN: tl.constexpr, VEC: tl.constexpr):
    """Where in the matrix a row and its whole vectors begin, and where these do in the row.

    Last the number of entries in whole vectors. The boundary is written as a multiple of VEC, so
    that the compiler knows it to be one.
    """
    start = row.to(tl.int64) * stride
    aligned = (start + (VEC - 1)) // VEC * VEC
    if EVEN:
        head = tl.zeros([], tl.int32)
        whole = head + cols
    else:
        head = tl.minimum((aligned - start).to(tl.int32), cols)
        whole = (cols - head) // VEC * VEC
    return start, aligned, head, whole


@triton.jit
def _entries(TILE: tl.constexpr, VEC: tl.constexpr):
    vectors = tl.arange(0, TILE // VEC)[:, None] * VEC
    return vectors, vectors + tl.arange(0, VEC)[None, :]


@triton.jit
def _ends(head, whole, cols, VEC: tl.constexpr):
    """Columns of the entries before and behind the whole vectors, and which of them there are."""
    i = tl.arange(0, 2 * VEC)
    columns = tl.where(i < VEC, i, head + whole + i - VEC)
    return columns, columns < tl.where(i < VEC, head, cols)


@triton.jit
def _statistics(
    x_ptr, start, aligned, head, whole, cols, SMOOTH: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr, VEC: tl.constexpr, POLICY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Largest entry m of a row, ``Σ exp(x - m)``, and ``Σ x``, which is 0 unless SMOOTH."""
    m = tl.full([TILE // VEC], LOWEST, tl.float32)
    s = tl.zeros([TILE // VEC], tl.float32)
    total = tl.zeros([TILE // VEC], tl.float32)
    vectors, entries = _entries(TILE, VEC)
    for at in tl.range(0, whole, TILE, num_stages=AHEAD):
        inside = vectors < whole - at
        x = tl.load(
            x_ptr + aligned + at + entries, mask=inside, other=float("-inf"),
            eviction_policy=POLICY,
        ).to(tl.float32)  # fmt: skip
        larger = tl.maximum(m, tl.max(x, 1))
        s = s * tl.exp(m - larger) + tl.sum(tl.exp(x - larger[:, None]), 1)
        m = larger
        if SMOOTH:
            total += tl.sum(tl.where(inside, x, 0.0), 1)
    top = tl.max(m, 0)
    if not EVEN:
        columns, inside = _ends(head, whole, cols, VEC)
        x = tl.load(x_ptr + start + columns, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0))
    sum_exp = tl.sum(s * tl.exp(m - top), 0)
    sum_x = tl.sum(total, 0)
    if not EVEN:
        sum_exp += tl.sum(tl.exp(x - top), 0)
        sum_x += tl.sum(tl.where(inside, x, 0.0), 0)
    return top, sum_exp, sum_x


@triton.jit
def _loss(
    x_ptr, start, aligned, head, whole, target, ignored, cols, smoothing, z_loss,
    SMOOTH: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
    POLICY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Loss of a row, and its statistics.

    An ignored row is not read: loss 0, largest entry 0, sum 1. A target that is no class gives nan.
    """
    is_class = (target >= 0) & (target < cols)
    readable = is_class & (ignored == 0)
    entry = tl.load(x_ptr + start + target, mask=readable, other=0.0).to(tl.float32)
    top, sum_exp, sum_x = _statistics(
        x_ptr, start, aligned, tl.where(ignored, 0, head), tl.where(ignored, 0, whole),
        tl.where(ignored, 0, cols), SMOOTH, EVEN, TILE, VEC, POLICY, AHEAD,
    )  # fmt: skip
    top = tl.where(ignored, 0.0, top)
    sum_exp = tl.where(ignored, 1.0, tl.where(is_class, sum_exp, float("nan")))
    log_sum = tl.log(sum_exp)
    lse = top + log_sum
    loss = top - entry
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * (top - sum_x / cols)
    loss += log_sum + z_loss * lse * lse
    return tl.where(ignored, 0.0, loss), top, sum_exp


@triton.jit
def _at_least_one(count_ptr):
    """The number of rows that count; where there are none, what it divides is 0."""
    return tl.maximum(tl.load(count_ptr), 1).to(tl.float32)


@triton.jit
def _factors(scale, ignored, top, sum_exp, z_loss):
    """What ``exp(x - m)`` and the other terms of a row's gradient are multiplied by."""
    scale = tl.where(ignored, 0.0, scale)
    return scale * (1.0 + 2.0 * z_loss * (top + tl.log(sum_exp))) / sum_exp, scale


@triton.jit
def _gradient(x, is_target, top, p_scale, scale, smoothing, uniform, SMOOTH: tl.constexpr):
    dx = tl.exp(x.to(tl.float32) - top) * p_scale
    if SMOOTH:
        dx -= uniform * scale
    return dx - tl.where(is_target, (1.0 - smoothing) * scale, 0.0)


@triton.jit
def forward_kernel(
    x_ptr, targets_ptr, loss_ptr, max_ptr, sum_ptr, stride, cols, ignore_index,
    smoothing, z_loss,
    SMOOTH: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Loss and statistics of row ``program_id(0)``."""
    row = tl.program_id(0)
    start, aligned, head, whole = _row(row, stride, cols, EVEN, VEC)
    target = tl.load(targets_ptr + row)
    loss, top, sum_exp = _loss(
        x_ptr, start, aligned, head, whole, target, target == ignore_index, cols, smoothing, z_loss,
        SMOOTH, EVEN, TILE, VEC, "evict_first", 1,
    )  # fmt: skip
    tl.store(loss_ptr + row, loss)
    tl.store(max_ptr + row, top)
    tl.store(sum_ptr + row, sum_exp)


@triton.jit
def statistics_kernel(
    x_ptr, targets_ptr, out_ptr, stride, cols, start_class, ignore_index,
    SMOOTH: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """What a rank tells of row ``program_id(0)``, of whose classes it has those from a start on.

    Largest entry, ``Σ exp(x - m)``, the target's entry, or 0, and ``Σ x``: 4 numbers. An ignored
    row is not read: 0, 1, 0, 0.
    """
    row = tl.program_id(0)
    start, aligned, head, whole = _row(row, stride, cols, EVEN, VEC)
    target = tl.load(targets_ptr + row)
    ignored = target == ignore_index
    column = target - start_class
    readable = (column >= 0) & (column < cols) & (ignored == 0)
    entry = tl.load(x_ptr + start + column, mask=readable, other=0.0).to(tl.float32)
    top, sum_exp, sum_x = _statistics(
        x_ptr, start, aligned, tl.where(ignored, 0, head), tl.where(ignored, 0, whole),
        tl.where(ignored, 0, cols), SMOOTH, EVEN, TILE, VEC, "evict_first", 1,
    )  # fmt: skip
    out = out_ptr + row.to(tl.int64) * 4
    tl.store(out, tl.where(ignored, 0.0, top))
    tl.store(out + 1, tl.where(ignored, 1.0, sum_exp))
    tl.store(out + 2, entry)
    tl.store(out + 3, sum_x)


@triton.jit
def backward_kernel(
    x_ptr, targets_ptr, max_ptr, sum_ptr, dloss_ptr, count_ptr, dx_ptr,
    stride, dx_stride, dloss_stride, cols, tiles, ignore_index, smoothing, uniform, z_loss,
    SMOOTH: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile, of ``tiles`` per row; the first one sees to the ends.

    Rows of both matrices lie alike between 16-byte boundaries; they may be the same matrix.
    Ignored rows are not read: the exponential of -inf, which stands for their entries, is 0. The
    target of a label-smoothed loss is ``uniform`` everywhere, and ``1 - smoothing`` at the class. A
    class that is none of the columns is that of another rank.
    """
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    start, aligned, head, whole = _row(row, stride, cols, EVEN, VEC)
    to, to_aligned, _, _ = _row(row, dx_stride, cols, EVEN, VEC)
    target = tl.load(targets_ptr + row)
    ignored = target == ignore_index
    top = tl.load(max_ptr + row)
    scale = tl.load(dloss_ptr + row.to(tl.int64) * dloss_stride)
    if count_ptr is not None:
        scale = scale / _at_least_one(count_ptr)
    p_scale, scale = _factors(scale, ignored, top, tl.load(sum_ptr + row), z_loss)
    vectors, entries = _entries(TILE, VEC)
    at = tile * TILE
    inside = vectors < whole - at
    x = tl.load(
        x_ptr + aligned + at + entries, mask=tl.where(ignored, False, inside), other=float("-inf"),
        eviction_policy="evict_first",
    )  # fmt: skip
    is_target = entries == (target - head - at).to(tl.int32)
    dx = _gradient(x, is_target, top, p_scale, scale, smoothing, uniform, SMOOTH)
    store_flat(dx_ptr + to_aligned + at, entries, inside, dx)
    if not EVEN:
        columns, inside = _ends(head, whole, cols, VEC)
        inside = tl.where(tile == 0, inside, False)
        readable = tl.where(ignored, False, inside)
        x = tl.load(x_ptr + start + columns, mask=readable, other=float("-inf"))
        dx = _gradient(x, columns == target, top, p_scale, scale, smoothing, uniform, SMOOTH)
        store_flat(dx_ptr + to, columns, inside, dx)


@triton.jit
def gradient_kernel(
    x_ptr, targets_ptr, count_ptr, loss_ptr, dx_ptr, stride, rows, cols, ignore_index,
    smoothing, z_loss,
    SMOOTH: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Loss of rows, and their gradient written over them (``dx_ptr`` is ``x_ptr``).

    A persistent grid: as few rows are in flight as keep the memory busy, so that the second read
    of a row finds it in the L2 cache. AHEAD tiles of a row are fetched before they are needed.
    """
    scale = 1.0
    if count_ptr is not None:
        scale = 1.0 / _at_least_one(count_ptr)
    uniform = smoothing / cols
    vectors, entries = _entries(TILE, VEC)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        start, aligned, head, whole = _row(tl.cast(row, tl.int64), stride, cols, EVEN, VEC)
        target = tl.load(targets_ptr + row)
        ignored = target == ignore_index
        loss, top, sum_exp = _loss(
            x_ptr, start, aligned, head, whole, target, ignored, cols, smoothing, z_loss,
            SMOOTH, EVEN, TILE, VEC, "evict_last", AHEAD,
        )  # fmt: skip
        tl.store(loss_ptr + row, loss)
        p_scale, row_scale = _factors(scale, ignored, top, sum_exp, z_loss)
        if not EVEN:
            end_columns, there = _ends(head, whole, cols, VEC)
            ends = tl.load(
                x_ptr + start + end_columns, mask=tl.where(ignored, False, there),
                other=float("-inf"),
            )  # fmt: skip
        # Every thread has read the target's entry and the ends before any of them writes.
        tl.debug_barrier()
        for at in tl.range(0, whole, TILE, num_stages=AHEAD):
            inside = vectors < whole - at
            x = tl.load(
                x_ptr + aligned + at + entries, mask=tl.where(ignored, False, inside),
                other=float("-inf"), eviction_policy="evict_first",
            )  # fmt: skip
            is_target = entries == (target - head - at).to(tl.int32)
            dx = _gradient(x, is_target, top, p_scale, row_scale, smoothing, uniform, SMOOTH)
            store_flat(dx_ptr + aligned + at, entries, inside, dx)
        if not EVEN:
            is_target = end_columns == target
            dx = _gradient(ends, is_target, top, p_scale, row_scale, smoothing, uniform, SMOOTH)
            store_flat(dx_ptr + start, end_columns, there, dx)


@triton.jit
def mean_kernel(
    loss_ptr, targets_ptr, mean_ptr, count_ptr, rows, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    """Mean of the losses of the rows that count, and their number; one program."""
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        total += tl.load(loss_ptr + row, mask=inside, other=0.0)
        target = tl.load(targets_ptr + row, mask=inside, other=ignore_index)
        count += (target != ignore_index).to(tl.int32)
    number = tl.sum(count, 0)
    tl.store(count_ptr, number.to(tl.int64))
    mean = tl.sum(total, 0) / tl.maximum(number, 1).to(tl.float32)
    tl.store(mean_ptr, tl.where(number > 0, mean, float("nan")))


@triton.jit
def scale_kernel(
    x_ptr, y_ptr, factor_ptr, count_ptr, size, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``y = x factor / count``; nothing in place by 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if count_ptr is not None:
        factor = factor / _at_least_one(count_ptr)
    end = tl.cast(size, tl.int64)
    if IN_PLACE:
        end = tl.where(factor == 1.0, 0, end)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, end, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < size).to(tl.float32)
        store_flat(y_ptr, i, i < size, x * factor)

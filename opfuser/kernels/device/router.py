"""A router of tokens to experts: scores, choice, weights and statistics, and the gradient.

Dimensions: T tokens, E experts in GROUPS groups, k of them for each token, P programs. A tile is
(BLOCK, WIDTH): WIDTH lanes hold the groups one after the other, each padded to a power of two.
Formulas: ``router_plain``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .store import store_rows

_TINY = tl.constexpr(1e-20)
_INFINITY = tl.constexpr(float("inf"))
# Less than every rank: of lanes without an expert that may be chosen, and of those that were.
_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFE)
_TAKEN = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
_LOW = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _ranks(scores, numbers):
    """int64 in the order in which ``torch.topk`` takes scores: NaN first, of equals the lowest.

    The high half orders scores, the low half falls with the number of the column.
    """
    bits = scores.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _LOW, bits)
    order = tl.where(scores != scores, _LOW, order)  # noqa: PLR0124  # NaN
    return (order.to(tl.int64) << 32) | (numbers ^ _LOW).to(tl.int64)


@triton.jit
def _number(ranks):
    """The column that a rank is of."""
    return ((ranks & _LOW) ^ _LOW).to(tl.int32)


@triton.jit
def _score(ranks):
    """The score that a rank is of."""
    order = (ranks >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ _LOW, order).to(tl.float32, bitcast=True)


@triton.jit
def _columns(EXPERTS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The expert of each lane, and whether there is one."""
    lane = tl.arange(0, WIDTH)
    group, place = lane // SIZE, lane % SIZE
    of_group = EXPERTS // GROUPS
    return group * of_group + place, (group < GROUPS) & (place < of_group)


@triton.jit
def _logits(logits_ptr, token, tokens, stride, expert, exists):
    """A tile in fp32: -inf where there is no expert, 0 where there is no token."""
    mask = (token < tokens)[:, None] & exists[None, :]
    at = logits_ptr + token[:, None] * stride + expert[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(exists[None, :], x, -_INFINITY)


@triton.jit
def _softmax(x, exists):
    """softmax(x) and logsumexp(x) of rows."""
    most = tl.max(x, axis=1)
    powers = tl.where(exists[None, :], tl.exp(x - most[:, None]), 0.0)
    total = tl.sum(powers, axis=1)
    sums = tl.where(tl.abs(most) == _INFINITY, most, most + tl.log(total))
    return powers / total[:, None], sums


@triton.jit
def _scores(x, exists, SIGMOID: tl.constexpr):
    """Scores, 0 where there is no expert; logsumexp(x); the divisor that makes them add up to 1."""
    scores, sums = _softmax(x, exists)
    total = tl.full((x.shape[0],), 1.0, tl.float32)
    if SIGMOID:
        scores = tl.where(exists[None, :], 1.0 / (1.0 + tl.exp(-x)), 0.0)
        total = tl.sum(scores, axis=1) + _TINY
    return scores, sums, total


@triton.jit
def _of_best_groups(
    ranks, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Ranks of the experts in the groups whose two best scores have the largest sums."""
    grouped = ranks.reshape(BLOCK, WIDTH // SIZE, SIZE)
    best = tl.max(grouped, axis=2)
    second = tl.max(tl.where(grouped == best[:, :, None], _NONE, grouped), axis=2)
    group = tl.arange(0, WIDTH // SIZE)[None, :]
    of_groups = _ranks(_score(best) + _score(second), group + tl.zeros_like(best).to(tl.int32))
    of_groups = tl.where(group < GROUPS, of_groups, _NONE)
    kept = of_groups == _NONE
    for _ in range(KEPT):
        hit = of_groups == tl.max(of_groups, axis=1)[:, None]
        kept = kept | hit
        of_groups = tl.where(hit, _NONE, of_groups)
    return tl.where(kept[:, :, None], grouped, _NONE).reshape(BLOCK, WIDTH)


@triton.jit
def forward(
    logits_ptr, bias_ptr, mask_ptr, weights_ptr, indices_ptr, counts_ptr, counted_ptr, sums_ptr,
    z_ptr, tokens, stride, factor,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, WIDTH_K: tl.constexpr,
):  # fmt: skip
    """Weights and indices (T, k), and of each program sums over its tokens, where wanted.

    The tokens of each expert (P, E), those that the mask counts (P, E), the scores that add up to
    one (P, E), and the squares of logsumexp (P,).
    """
    expert, exists = _columns(EXPERTS, GROUPS, WIDTH, SIZE)
    choice = tl.arange(0, WIDTH_K)[None, :]
    bias = tl.zeros((WIDTH,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
    counts = tl.zeros((WIDTH,), tl.int32)
    counted = tl.zeros((WIDTH,), tl.int32)
    sums = tl.zeros((WIDTH,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(start, tl.cast(tokens, tl.int64), step):
        token = first + tl.arange(0, BLOCK)
        below = token < tokens
        x = _logits(logits_ptr, token, tokens, stride, expert, exists)
        scores, lse, total = _scores(x, exists, SIGMOID)
        corrected = scores + bias[None, :] if bias_ptr is not None else scores
        left = tl.where(exists[None, :], _ranks(corrected, expert[None, :]), _NONE)
        if GROUPS > 1:
            left = _of_best_groups(left, GROUPS, KEPT, BLOCK, WIDTH, SIZE)
        weights = tl.zeros((BLOCK, WIDTH_K), tl.float32)
        indices = tl.zeros((BLOCK, WIDTH_K), tl.int32)
        for n in range(TOP_K):
            best = tl.max(left, axis=1)
            hit = left == best[:, None]
            score = tl.sum(tl.where(hit, scores, 0.0), axis=1)
            weights = tl.where(choice == n, score[:, None], weights)
            indices = tl.where(choice == n, _number(best)[:, None], indices)
            left = tl.where(hit, _TAKEN, left)
        if NORM:
            weights = weights / (tl.sum(weights, axis=1) + _TINY)[:, None]
        inside = below[:, None] & (choice < TOP_K)
        store_rows(weights_ptr, token[:, None], TOP_K, choice, inside, weights * factor)
        store_rows(indices_ptr, token[:, None], TOP_K, choice, inside, indices)
        taken = left == _TAKEN
        counts += tl.sum((taken & below[:, None]).to(tl.int32), axis=0)
        counts_too = below
        if mask_ptr is not None:
            counts_too = below & (tl.load(mask_ptr + token, mask=below, other=0) != 0)
            counted += tl.sum((taken & counts_too[:, None]).to(tl.int32), axis=0)
        if sums_ptr is not None:
            shares = scores / total[:, None] if SIGMOID else scores
            sums += tl.sum(tl.where(counts_too[:, None], shares, 0.0), axis=0)
        if z_ptr is not None:
            squares += tl.where(counts_too, lse * lse, 0.0)
    at = tl.program_id(0) * EXPERTS + expert
    tl.store(counts_ptr + at, counts, mask=exists)
    if mask_ptr is not None:
        tl.store(counted_ptr + at, counted, mask=exists)
    if sums_ptr is not None:
        tl.store(sums_ptr + at, sums, mask=exists)
    if z_ptr is not None:
        tl.store(z_ptr + tl.program_id(0), tl.sum(squares, axis=0))


@triton.jit
def _total(
    parts_ptr, programs,
    DTYPE: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The sums of the columns of parts (P, E)."""
    expert = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((PARTS, WIDTH), DTYPE)
    for first in range(0, programs, PARTS):
        part = (first + tl.arange(0, PARTS))[:, None]
        inside = (part < programs) & (expert < EXPERTS)
        total += tl.load(parts_ptr + part * EXPERTS + expert, mask=inside, other=0).to(DTYPE)
    return tl.sum(total, axis=0)


@triton.jit
def statistics(
    counts_ptr, counted_ptr, sums_ptr, z_ptr, tokens_ptr, number_ptr, fractions_ptr, aux_ptr,
    z_loss_ptr, terms_ptr, tokens, programs,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    """Sums of what programs of :func:`forward` left, and the losses that are made of them.

    The tokens of each expert (E,), the number of tokens that count (), f of the load-balancing loss
    (E,), that loss and the z-loss (), and f and P (2, E).
    """
    expert = tl.arange(0, WIDTH)
    exists = expert < EXPERTS
    counts = _total(counts_ptr, programs, tl.int64, EXPERTS, WIDTH, PARTS)
    tl.store(tokens_ptr + expert, counts, mask=exists)
    number = tl.maximum(tl.cast(tokens, tl.int64), 1).to(tl.float32)
    if counted_ptr is not None:
        counts = _total(counted_ptr, programs, tl.int64, EXPERTS, WIDTH, PARTS)
        number = tl.maximum(tl.sum(counts, axis=0) // TOP_K, 1).to(tl.float32)
        tl.store(number_ptr, number)
    if sums_ptr is not None:
        fractions = counts.to(tl.float32) / number
        means = _total(sums_ptr, programs, tl.float32, EXPERTS, WIDTH, PARTS) / number
        tl.store(fractions_ptr + expert, fractions, mask=exists)
        if aux_ptr is not None:
            tl.store(aux_ptr, tl.sum(fractions * means, axis=0) * EXPERTS)
        if terms_ptr is not None:
            tl.store(terms_ptr + expert, fractions, mask=exists)
            tl.store(terms_ptr + EXPERTS + expert, means, mask=exists)
    if z_ptr is not None:
        total = tl.zeros((LONG,), tl.float32)
        for first in range(0, programs, LONG):
            part = first + tl.arange(0, LONG)
            total += tl.load(z_ptr + part, mask=part < programs, other=0.0)
        tl.store(z_loss_ptr, tl.sum(total, axis=0) / number)


@triton.jit
def backward(
    logits_ptr, dweights_ptr, indices_ptr, mask_ptr, number_ptr, fractions_ptr, daux_ptr, dz_ptr,
    dterms_ptr, dx_ptr, tokens, stride, factor,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits (T, E), from those of the weights and of the losses, if any.

    A tile per program. Scores are recomputed.
    """
    expert, exists = _columns(EXPERTS, 1, WIDTH, WIDTH)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    below = token < tokens
    x = _logits(logits_ptr, token, tokens, stride, expert, exists)
    scores, lse, total = _scores(x, exists, SIGMOID)
    ds = tl.zeros((BLOCK, WIDTH), tl.float32)
    chosen = tl.zeros((BLOCK, WIDTH), tl.int1)
    for n in range(TOP_K):
        index = tl.load(indices_ptr + token * TOP_K + n, mask=below, other=0)
        dw = tl.load(dweights_ptr + token * TOP_K + n, mask=below, other=0.0).to(tl.float32)
        hit = index[:, None] == expert[None, :]
        ds = tl.where(hit, (dw * factor)[:, None], ds)
        chosen = chosen | hit
    if NORM:
        sums = tl.sum(tl.where(chosen, scores, 0.0), axis=1)[:, None] + _TINY
        mean = tl.sum(tl.where(chosen, ds * (scores / sums), 0.0), axis=1)[:, None]
        ds = tl.where(chosen, (ds - mean) / sums, 0.0)
    counts_too = below
    number = tl.maximum(tl.cast(tokens, tl.int64), 1).to(tl.float32)
    if mask_ptr is not None:
        counts_too = below & (tl.load(mask_ptr + token, mask=below, other=0) != 0)
        number = tl.load(number_ptr)
    if daux_ptr is not None or dterms_ptr is not None:
        dmeans = tl.zeros((WIDTH,), tl.float32)
        if daux_ptr is not None:
            fractions = tl.load(fractions_ptr + expert, mask=exists, other=0.0)
            dmeans += tl.load(daux_ptr).to(tl.float32) * EXPERTS * fractions
        if dterms_ptr is not None:
            dmeans += tl.load(dterms_ptr + EXPERTS + expert, mask=exists, other=0.0).to(tl.float32)
        dshares = (dmeans / number)[None, :]
        if SIGMOID:
            mean = tl.sum(dshares * (scores / total[:, None]), axis=1)[:, None]
            dshares = (dshares - mean) / total[:, None]
        ds += tl.where(counts_too[:, None], dshares, 0.0)
    if SIGMOID:
        dx = ds * scores * (1.0 - scores)
    else:
        dx = scores * (ds - tl.sum(ds * scores, axis=1)[:, None])
    if dz_ptr is not None:
        slope = tl.load(dz_ptr).to(tl.float32) * (2.0 / number) * lse
        shares = scores
        if SIGMOID:
            shares, _ = _softmax(x, exists)
        dx += tl.where(counts_too[:, None], slope[:, None] * shares, 0.0)
    inside = below[:, None] & exists[None, :]
    store_rows(dx_ptr, token[:, None], EXPERTS, expert[None, :], inside, dx)

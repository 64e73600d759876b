"""Attention by ``torch.nn.attention.flex_attention``: what is computed, forward and backward apart.

Both passes are torch's operators for it, of which Inductor makes one kernel each. What changes a
score and what hides a key are functions that end up in these kernels; tensors that they read are
arguments. :mod:`.flex_compiled` compiles both for eager calls; where a caller's torch.compile
traces, they become part of its graph. Not compiled, they hold all scores.

Source: Dong et al., "Flex Attention", 2024, arXiv 2412.05496.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..kernels.scalar import wide_dtype
from .call import Call, Heads

_BLOCK = 128  # queries or keys; those of which all are hidden cost nothing
_LN2 = math.log(2)
_forward = torch.ops.higher_order.flex_attention
_backward = torch.ops.higher_order.flex_attention_backward


class Form(NamedTuple):
    """What the kernels are made for, besides dtypes and sizes: constants in them.

    Attributes:
        causal, scale, window, softcap: of the call.
        alibi: whether it has slopes.
        shifted: whether the first query is not at the position of the first key.
        mask: the dimensions in which the mask is not of size 1; None: no mask.
        additive: whether the mask is added.
    """

    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    alibi: bool
    shifted: bool
    mask: tuple[int, ...] | None
    additive: bool


class Given(NamedTuple):
    """Tensors that a form reads, each None where it does not.

    Attributes:
        slopes: (H,), fp32 or fp64.
        offset: (), the position of the first query.
        ids: (T,), int32, to which sequence a position belongs.
        mask: with those dimensions that are in ``Form.mask``.
    """

    slopes: Tensor | None
    offset: Tensor | None
    ids: Tensor | None
    mask: Tensor | None


def form_of(x: Heads, call: Call) -> Form:
    """The form of a call."""
    mask = call.mask
    return Form(
        call.causal,
        call.scale,
        call.window,
        call.softcap,
        call.slopes is not None,
        call.start is not None or x.q.shape[2] != x.k.shape[2],
        None if mask is None else tuple(i for i, size in enumerate(mask.shape) if size != 1),
        mask is not None and mask.dtype != torch.bool,
    )


def given_of(x: Heads, call: Call, form: Form) -> Given:
    """What a call gives to the functions of its form."""
    slopes, offset, mask = call.slopes, call.start, call.mask
    wide = wide_dtype(x.q.dtype)
    if form.shifted and offset is None:
        # Not torch.tensor(...), which would copy from the host, and wait.
        offset = torch.full((), x.k.shape[2] - x.q.shape[2], device=x.q.device, dtype=torch.int32)
    if mask is not None and form.mask is not None:
        mask = mask.to(wide) if mask.dtype == torch.float64 else mask
        mask = mask.squeeze(tuple(i for i in range(4) if i not in form.mask))
    slopes = None if slopes is None else slopes.to(wide)
    return Given(slopes, offset, _sequence_ids(call.cu_seqlens, x.k.shape[2]), mask)


def dtypes_of(x: Heads, call: Call, form: Form) -> tuple[torch.dtype | None, ...]:
    """The dtypes of what :func:`given_of` returns, which costs no launch."""
    wide = wide_dtype(x.q.dtype)
    offset = torch.int32 if call.start is None else call.start.dtype
    mask = None if call.mask is None else call.mask.dtype
    return (
        None if call.slopes is None else wide,
        offset if form.shifted else None,
        None if call.cu_seqlens is None else torch.int32,
        wide if mask == torch.float64 else mask,
    )


def _sequence_ids(cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    if cu_seqlens is None:
        return None
    at = torch.arange(length, device=cu_seqlens.device, dtype=torch.int32)
    return torch.searchsorted(cu_seqlens, at, right=True, out_int32=True)


@torch.library.custom_op("opfuser::captured", mutates_args=(), schema="(Tensor x) -> Tensor")
def captured(x: Tensor) -> Tensor:
    """A contiguous copy that Inductor computes before the kernel that reads it.

    As far as torch 2.13, the lowering of the backward operator raises an AssertionError for a
    captured tensor that the same graph computes, since it does not fix its layout. And its kernel
    takes the log-sum-exp for contiguous, whose rows Inductor pads where the graph computes it for a
    fixed length: gradients were wrong for lengths such as 300.
    """
    return x.clone(memory_format=torch.contiguous_format)


@captured.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _options() -> dict[str, Any]:
    """All that torch's own function fills in before it calls the operator."""
    return {
        "BACKEND": "TRITON",  # for short queries as well, of which another kernel would be made
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": False,
    }


class _Functions(NamedTuple):
    """What the operators are given: functions of scalars, and the tensors that these read.

    Attributes:
        score: the score that is used, of the scaled product, its indices and tensors.
        grad: the gradients of all arguments of ``score``, which has that of its result before the
            tensors.
        seen: whether a key is seen, of indices and tensors.
        of_score, of_seen: the tensors.
    """

    score: Callable[..., Tensor]
    grad: Callable[..., list[Tensor | None]]
    seen: Callable[..., Tensor]
    of_score: tuple[Tensor, ...]
    of_seen: tuple[Tensor, ...]


def _functions(form: Form, given: Given) -> _Functions:
    slopes, offset, ids, mask = given
    cap, window = form.softcap, form.window
    added = mask if form.additive else None
    chosen = None if form.additive else mask
    bounded = form.causal or window is not None
    for_score = {"slopes": slopes, "offset": offset if form.alibi else None, "mask": added}
    for_seen = {"offset": offset if bounded else None, "ids": ids, "mask": chosen}
    score_names = [name for name, t in for_score.items() if t is not None]
    seen_names = [name for name, t in for_seen.items() if t is not None]

    def entry(mask: Tensor, *indices: Tensor) -> Tensor:
        assert form.mask is not None
        at = tuple(indices[i] for i in form.mask)
        return mask[at] if at else mask

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        read = dict(zip(score_names, tensors))
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        if form.alibi:
            at = i + read["offset"] if form.shifted else i
            s = s - read["slopes"][h] * (at - j).abs()
        return s + entry(read["mask"], b, h, i, j) if "mask" in read else s

    def grad(
        s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, ds: Tensor, *tensors: Tensor
    ) -> list[Tensor | None]:
        if cap is not None:
            tanh = torch.tanh(s / cap)
            ds = ds * (1 - tanh * tanh)
        return [ds, *[None] * (4 + len(tensors))]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *tensors: Tensor) -> Tensor:
        read = dict(zip(seen_names, tensors))
        shown = i.new_ones((), dtype=torch.bool)
        if bounded:
            distance = (i + read["offset"] if form.shifted else i) - j
            if form.causal:
                shown = shown & (distance >= 0)
            if window is not None:
                shown = shown & (distance.abs() < window)
        if "ids" in read:
            shown = shown & (read["ids"][i] == read["ids"][j])
        return shown & entry(read["mask"], b, h, i, j) if "mask" in read else shown

    tensors = tuple(for_score[name] for name in score_names)
    others = tuple(for_seen[name] for name in seen_names)
    return _Functions(score, grad, seen, tensors, others)  # type: ignore[arg-type]


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks there are in each row, and which: as many entries, and zeros behind them."""
    rows, columns = blocks.shape
    rank = blocks.cumsum(-1, dtype=torch.int32)
    at = torch.where(blocks, rank.long() - 1, columns)  # others go to one more column
    order = at.new_zeros(rows, columns + 1, dtype=torch.int32)
    index = torch.arange(columns, device=at.device, dtype=torch.int32).expand(rows, columns)
    order = order.scatter(1, at, index).narrow(1, 0, columns)
    count = blocks.sum(-1, dtype=torch.int32)
    return count.view(1, 1, rows), order.contiguous().view(1, 1, rows, columns)


def _block_mask(x: Heads, form: Form, given: Given) -> tuple[Any, ...]:
    """Which blocks of queries and keys have anything to compute, and which need no mask.

    It follows from the first and last position of each block. What a mask hides is not looked for:
    that would read all of it.
    """
    length, span, device, ids = x.q.shape[2], x.k.shape[2], x.q.device, given.ids
    starts = torch.arange(0, length, _BLOCK, device=device).unsqueeze(1)
    first = torch.arange(0, span, _BLOCK, device=device)
    stops, last = starts + _BLOCK - 1, first + _BLOCK - 1
    whole = (stops < length) & (last < span)
    stops, last = stops.clamp(max=length - 1), last.clamp(max=span - 1)
    at, to = starts, stops
    if given.offset is not None:
        at, to = at + given.offset, to + given.offset
    some = torch.ones_like(whole)
    if form.causal:
        some, whole = some & (first <= to), whole & (last <= at)
    if form.window is not None:
        some = some & (at - last < form.window) & (first - to < form.window)
        whole = whole & (to - first < form.window) & (last - at < form.window)
    if ids is not None:
        some = some & (ids[first] <= ids[stops]) & (ids[starts] <= ids[last])
        same = (ids[starts] == ids[stops]) & (ids[first] == ids[last])
        whole = whole & same & (ids[starts] == ids[first])
    if given.mask is not None and not form.additive:
        whole = torch.zeros_like(whole)
    some = some & ~whole
    count, order = _ordered(some)
    full_count, full_order = _ordered(whole)
    columns, of_columns = _ordered(some.t())
    full_columns, of_full_columns = _ordered(whole.t())
    return BlockMask(
        seq_lengths=(length, span),
        kv_num_blocks=count,
        kv_indices=order,
        full_kv_num_blocks=full_count,
        full_kv_indices=full_order,
        q_num_blocks=columns,
        q_indices=of_columns,
        full_q_num_blocks=full_columns,
        full_q_indices=of_full_columns,
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=_nothing,
    ).as_tuple()[:-1]  # which has more fields in later versions, the last being mask_mod


def _nothing(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return b.new_ones((), dtype=torch.bool)


def attend(form: Form, x: Heads, given: Given) -> tuple[Tensor, Tensor]:
    """The output (B, H, S, V), and (B, H, S), the log-sum-exp of the scores of each query."""
    made = _functions(form, given)
    blocks = *_block_mask(x, form, given), made.seen
    tensors = made.of_score, made.of_seen
    y, logsumexp, _ = _forward(*x, made.score, blocks, form.scale, _options(), *tensors)
    return y, logsumexp * _LN2


def to_base_2(logsumexp: Tensor) -> Tensor:
    """The log-sum-exp of :func:`attend` as :func:`gradients` takes it, contiguous."""
    return logsumexp / _LN2


def gradients(
    form: Form,
    dy: Tensor,
    x: Heads,
    y: Tensor,
    logsumexp: Tensor,
    given: Given,
    copied: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv for the gradient of the output.

    Args:
        logsumexp: to base 2, of :func:`to_base_2`.
        copied: whether tensors may be computed in the graph that this is traced into. Otherwise
            they are its inputs, whose layout Inductor does not change.
    """
    if copied:
        logsumexp = captured(logsumexp)
        given = Given(*(None if t is None else captured(t) for t in given))
    made = _functions(form, given)
    blocks = *_block_mask(x, form, given), made.seen
    functions = made.score, made.grad, blocks, form.scale, _options()
    kept = y, logsumexp, dy, None
    dq, dk, dv, _ = _backward(*x, *kept, *functions, made.of_score, made.of_seen)
    return dq, dk, dv

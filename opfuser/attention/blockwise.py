"""Attention in plain torch, for a block of queries at a time: every mode, on every device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.philox import draw_seed, philox
from ..kernels.pointwise_plain import rescale, threshold
from ..kernels.scalar import wide_dtype
from ..kernels.tracing import hint, pieces
from .call import Call, Grads, Heads, Kernel, Request, Result

_SCORES = 1 << 25  # held at a time: 128 MiB in fp32
_LEAST = 1e-30  # of a sum whose largest term is 1, if there is any
_FEWEST = 128  # queries of a block where each sees few keys


class _Block(NamedTuple):
    """Weights of a block of queries.

    Attributes:
        keys: that some query of the block may see.
        weights: (B, H, queries, keys), in fp32 or better, before dropout.
        of_sinks: those of the sinks, (B, H, queries, 1).
        tanh: of scores over the cap, if they are soft-capped.
        kept: which weights dropout keeps.
    """

    keys: slice
    weights: Tensor
    of_sinks: Tensor | None
    tanh: Tensor | None
    kept: Tensor | None


def _reach(x: Heads, call: Call) -> int | None:
    """How many positions back, its own included, a query can see; None: all of them.

    Of a variable length all are looked at: bounds that follow from it would be symbols, of which a
    tracer has to compare many.
    """
    if isinstance(x.k.shape[2], torch.SymInt):
        return None
    reach = call.window
    if call.cu_seqlens is not None:
        reach = call.max_seqlen if reach is None else min(reach, call.max_seqlen)
    return reach


def _blocks(x: Heads, call: Call) -> list[slice]:
    batch, heads, queries = x.q.shape[:3]
    length, span = hint(queries), hint(x.k.shape[2])
    reach = _reach(x, call)
    widest = length
    if reach is not None:
        widest = max(reach, _FEWEST)
        span = min(span, 2 * widest)
    size = _SCORES // max(1, hint(batch) * heads * span)
    size = max(1, min(size, widest))
    if isinstance(queries, torch.SymInt):
        return pieces(queries, -(-length // size))
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def _keys(x: Heads, call: Call, rows: slice) -> slice:
    length = x.k.shape[2]
    shift, reach = length - x.q.shape[2], _reach(x, call)
    stop = length
    if isinstance(length, torch.SymInt):
        return slice(0, length)
    if call.causal or reach is not None:
        ahead = 0 if call.causal or reach is None else reach - 1
        stop = min(max(rows.stop + shift + ahead, 0), length)
    start = 0 if reach is None else min(max(rows.start + shift - reach + 1, 0), stop)
    return slice(start, stop)


def hidden_keys(x: Heads, call: Call, rows: slice, keys: slice) -> Tensor | None:
    """Which keys causality, window and sequences hide from queries; broadcasts to the scores."""
    bounded = call.window is not None or call.cu_seqlens is not None or call.start is not None
    if not (call.causal or bounded):
        return None
    at = _positions(x, call, rows)
    other = torch.arange(keys.start, keys.stop, device=x.q.device)
    distance = at[:, None] - other
    hidden = distance < 0 if call.causal else torch.zeros_like(distance, dtype=torch.bool)
    if call.window is not None:
        hidden = hidden | (distance.abs() >= call.window)
    if call.start is not None:
        hidden = hidden | (other >= call.start + x.q.shape[2])
    if call.cu_seqlens is not None:
        cu = call.cu_seqlens
        own, others = (torch.searchsorted(cu, t.to(cu.dtype), right=True) for t in (at, other))
        hidden = hidden | (own[:, None] != others)
    return hidden


def _positions(x: Heads, call: Call, rows: slice) -> Tensor:
    at = torch.arange(rows.start, rows.stop, device=x.q.device)
    return at + (x.k.shape[2] - x.q.shape[2] if call.start is None else call.start)


def survivors(x: Heads, p: float, seed: Tensor, rows: slice, keys: slice) -> Tensor:
    """Which weights dropout keeps.

    That of the key j for query row r of all heads has word j % 4 of Philox at (j // 4, r, 0, 0).
    """
    batch, heads, length = x.q.shape[:3]
    first, stop = keys.start // 4, -(-keys.stop // 4)
    c0 = torch.arange(first, stop, device=seed.device)[None, :]
    r = torch.arange(rows.start, rows.stop, device=seed.device)
    c1 = (torch.arange(batch * heads, device=seed.device)[:, None] * length + r).view(-1, 1)
    words = torch.stack(philox(seed, c0, c1), -1).flatten(1)
    words = words[:, keys.start - 4 * first : keys.stop - 4 * first]
    shape = batch, heads, rows.stop - rows.start, keys.stop - keys.start
    return (words >= threshold(p)).view(shape)


def _shared(rows_of_heads: Tensor, kv_heads: int) -> Tensor:
    """(B, H, …, …) as (B, K, G * …, …): the queries of all heads that share keys, as rows."""
    batch, heads, rows, width = rows_of_heads.shape
    return rows_of_heads.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def _block(x: Heads, call: Call, rows: slice, seed: Tensor | None) -> _Block:
    keys = _keys(x, call, rows)
    q, k = x.q[:, :, rows], x.k[:, :, keys]
    batch, heads, count, _ = q.shape
    scores = _shared(q, k.shape[1]) @ k.transpose(2, 3)
    scores = scores.view(batch, heads, count, k.shape[2]).to(wide_dtype(q.dtype)) * call.scale
    tanh = None
    if call.softcap is not None:
        tanh = torch.tanh(scores / call.softcap)
        scores = tanh * call.softcap
    if call.slopes is not None:
        at = _positions(x, call, rows)[:, None]
        distance = (at - torch.arange(keys.start, keys.stop, device=q.device)).abs()
        scores = scores - call.slopes.to(scores.dtype)[:, None, None] * distance
    if call.bias is not None:
        scores = scores + _part(call.bias, rows, keys).to(scores.dtype)
    hidden = hidden_keys(x, call, rows, keys)
    if call.mask is not None:
        mask = _part(call.mask, rows, keys)
        if mask.dtype != torch.bool:
            scores = scores + mask
        else:
            hidden = ~mask if hidden is None else hidden | ~mask
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    kept = None if seed is None else survivors(x, call.dropout_p, seed, rows, keys)
    return _Block(keys, *_softmax(scores, call.sinks), tanh, kept)


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weights of keys and sinks; 0 where a query sees no key."""
    lowest = torch.finfo(scores.dtype).min
    largest = scores.new_full((*scores.shape[:3], 1), lowest)
    if scores.shape[3]:
        largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
    if sinks is None:
        weights = (scores - largest).exp_()
        return weights / weights.sum(-1, keepdim=True).clamp_min(_LEAST), None
    logits = sinks.to(scores.dtype)[:, None, None]
    largest = torch.maximum(largest, logits)
    weights, of_sinks = (scores - largest).exp_(), (logits - largest).exp_()
    total = weights.sum(-1, keepdim=True) + of_sinks
    return weights / total, of_sinks / total


def _part(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
    return mask if mask.shape[3] == 1 else mask[..., keys]


def _forward(x: Heads, call: Call) -> Result:
    seed = draw_seed(x.q) if call.dropout_p else None
    outputs = []
    for rows in _blocks(x, call):
        keys, p, _, _, kept = _block(x, call, rows, seed)
        if kept is not None:
            p = p * kept * rescale(call.dropout_p)
        v = x.v[:, :, keys]
        y = _shared(p.to(v.dtype), v.shape[1]) @ v
        outputs.append(y.view(*p.shape[:3], v.shape[3]))
    if len(outputs) == 1:
        return Result(outputs[0], seed=seed)
    if not outputs:
        return Result(x.q.new_empty(*x.q.shape[:3], x.v.shape[3]), seed=seed)
    return Result(torch.cat(outputs, 2), seed=seed)


def _backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Grads:
    dtype, kv_heads = wide_dtype(dy.dtype), x.k.shape[1]
    dq = torch.empty_like(x.q)
    dk, dv = (torch.zeros_like(t, dtype=dtype) for t in x[1:])
    dsinks = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=dtype)
    dbias = None
    if call.bias is not None and call.bias_grad:
        dbias = torch.zeros_like(call.bias, dtype=dtype)
    for rows in _blocks(x, call):
        keys, p, of_sinks, tanh, kept = _block(x, call, rows, r.seed)
        dy_rows = _shared(dy[:, :, rows], kv_heads)
        dp = (dy_rows @ x.v[:, :, keys].transpose(2, 3)).view(p.shape).to(dtype)
        weights = p
        if kept is not None:
            weights, dp = (t * kept * rescale(call.dropout_p) for t in (p, dp))
        dv[:, :, keys] += _shared(weights.to(dy.dtype), kv_heads).transpose(2, 3) @ dy_rows
        delta = (p * dp).sum(-1, keepdim=True)
        if of_sinks is not None and dsinks is not None:
            dsinks -= (of_sinks * delta).sum((0, 2, 3))
        ds = p * (dp - delta)
        if dbias is not None:
            part = _part(dbias, rows, keys)
            part += ds.sum_to_size(part.shape)
        ds = ds * call.scale
        if tanh is not None:
            ds = ds * (1 - tanh * tanh)
        ds = _shared(ds.to(dy.dtype), kv_heads)
        dq[:, :, rows] = (ds @ x.k[:, :, keys]).view(dq[:, :, rows].shape)
        dk[:, :, keys] += ds.transpose(2, 3) @ _shared(x.q[:, :, rows], kv_heads)
    return Grads(dq, dk.to(dy.dtype), dv.to(dy.dtype), dsinks, dbias)


def _refusal(request: Request) -> str | None:
    return None


BLOCKWISE = Kernel(_refusal, _forward, _backward, reads_output=False, has_sinks=True)

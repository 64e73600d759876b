"""Rows of tokens on the ranks that have their experts, and back: one exchange in each direction.

Symbols: n ranks, E experts, of which each rank has E / n in succession; R rows that a rank sends,
sorted by expert; S rows that it receives; D features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, NotSupportedError, counted, explain
from ..runtime.recording import unwatched
from .collectives import gather_into

_DTYPES = sorted({str(v) for v in vars(torch).values() if isinstance(v, torch.dtype)})


class Route(NamedTuple):
    """Which rows each rank sends to which.

    Attributes:
        row_order: (S,), for each row, sorted by expert, its place in the order of arrival.
        rank_sizes: (2, n), on the CPU: the rows sent to each rank, and those received from each.
    """

    row_order: Tensor
    rank_sizes: Tensor


class Call(NamedTuple):
    """What ranks must agree on in a call, or they wait for each other's data in vain.

    Where rows are ``padded``, each expert has as many as any other, on every rank.
    """

    rows: Tensor
    weights: Tensor | None
    needs_rows: bool
    needs_weights: bool
    padded: bool

    def header(self) -> list[int]:
        """It in integers; :func:`_told` tells it."""
        weights = -1 if self.weights is None else _DTYPES.index(str(self.weights.dtype))
        of_rows = _DTYPES.index(str(self.rows.dtype)), self.rows.shape[1]
        number = self.rows.shape[0] if self.padded else -1
        return [number, *of_rows, weights, int(self.needs_rows), int(self.needs_weights)]


def _told(header: Sequence[int]) -> str:
    number, dtype, features, weights, *needs = header
    text = "" if number < 0 else f"{counted(number, 'row')}, "
    text += f"{features} features of {_DTYPES[dtype]}"
    text += ", no weights" if weights < 0 else f", weights of {_DTYPES[weights]}"
    named = [name for name, flag in zip(("rows", "weights"), needs) if flag]
    return f"{text}, gradients of {' and '.join(named) or 'nothing'}"


def refuse_tracing(where: str) -> None:
    """Raises NotSupportedError while torch.compile traces."""
    if torch.compiler.is_compiling():
        raise NotSupportedError.explained(
            "The host reads how many rows ranks exchange, which no graph holds",
            where=where,
            received="a call under torch.compile",
            remedy="Compile the parts before and after the experts",
        )


def agree_on_experts(
    number: int, padded: bool, like: Tensor, group: dist.ProcessGroup | None
) -> None:
    """Raises InputError on every rank if the ranks have different numbers of experts."""
    own = like.new_tensor([number, padded], dtype=torch.int64)
    with unwatched("the host reads what ranks agree on"):
        found = gather_into(own.new_empty(2 * dist.get_world_size(group)), own, group).tolist()
    told = [f"{n} experts" + ", padded" * flag for n, flag in zip(found[::2], found[1::2])]
    _check_alike("have the same number of experts", told)


def route_of(
    split_sizes: Tensor, call: Call, group: dist.ProcessGroup | None
) -> tuple[Route, Tensor]:
    """The route of rows, and how many of them each of this rank's experts gets, (E / n,).

    The host waits for the device once, as collectives want the sizes there; not for padded rows.

    Raises:
        InputError: on every rank, if the calls of ranks differ, or the split sizes of one of them
            do not add up to its rows. Of padded rows the device tells, as of a failed assertion.
    """
    ranks, sizes = dist.get_world_size(group), split_sizes.long()
    experts, rows = len(sizes) // ranks, call.rows.shape[0]
    with unwatched("the host reads how many rows ranks exchange"):
        wrong = (sizes.sum() != rows) | (sizes < 0).any()
        if call.padded:
            wrong |= (sizes * len(sizes) != rows).any()
        own = torch.tensor(call.header(), device="cpu").to(sizes.device, non_blocking=True)
        header = torch.cat([wrong.long().view(1), own])
        message = torch.cat([sizes.view(ranks, -1), header.expand(ranks, -1)], 1)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=group)
        counts, told = received[:, :experts], received[:, experts:]
        if call.padded:
            alike = ((told == header) & (told[:, :1] == 0)).all()
            if told.is_cpu and not alike:
                _check(told.tolist(), padded=True)
            text = f"All ranks of a group must make the same call, and {_PADDED}"
            torch.ops.aten._assert_async.msg(alike, explain(text, where="Dispatch"))
            return _route_of_padded(rows, experts, ranks, sizes)
        each = [message[:, :experts].sum(1, True), counts.sum(1, True), told]
        host = torch.cat(each, 1).cpu()
    _check(host[:, 2:].tolist(), padded=False)
    rank_sizes = host[:, :2].t().contiguous()
    expert_of = (
        torch.arange(experts, device=sizes.device)
        .repeat(ranks)
        .repeat_interleave(counts.reshape(-1), output_size=int(rank_sizes[1].sum()))
    )
    return Route(expert_of.argsort(stable=True), rank_sizes), counts.sum(0)


def _route_of_padded(rows: int, experts: int, ranks: int, like: Tensor) -> tuple[Route, Tensor]:
    """As :func:`route_of`, from what the host knows."""
    capacity = rows // (ranks * experts)
    arrived = torch.arange(rows, device=like.device).view(ranks, experts, capacity)
    rank_sizes = torch.full((2, ranks), experts * capacity, device="cpu")
    own_sizes = like.new_full((experts,), ranks * capacity)
    return Route(arrived.transpose(0, 1).reshape(-1), rank_sizes), own_sizes


_ADD_UP = "The split sizes must not be negative, and add up to the number of rows"
_PADDED = "of padded rows each expert must have as many as any other"


def _check(told: Sequence[Sequence[int]], *, padded: bool) -> None:
    """Raises InputError if sizes of a rank are wrong, or what ranks tell differs."""
    wrong_on = [f"rank {n}" for n, (wrong, *_) in enumerate(told) if wrong]
    if wrong_on:
        raise InputError.explained(
            f"{_ADD_UP}; {_PADDED}" if padded else _ADD_UP,
            where="Dispatch",
            received=f"others on {', '.join(wrong_on)}",
        )
    remedy = ""
    if len({number for _, number, *_ in told}) > 1:
        remedy = "Give each rank as many tokens, or leave the capacity out"
    _check_alike("make the same call", [_told(header) for _, *header in told], remedy)


def _check_alike(what: str, told: Sequence[str], remedy: str = "") -> None:
    if len({*told}) > 1:
        raise InputError.explained(
            f"All ranks of a group must {what}",
            where="Dispatch",
            received="; ".join(f"rank {n}: {text}" for n, text in enumerate(told)),
            remedy=remedy,
        )


def send(x: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
    """From this rank's rows (R, ...) those of its experts (S, ...), sorted by expert."""
    sent, received = route.rank_sizes.tolist()
    return _exchange(x.contiguous(), sent, received, group).rows.index_select(0, route.row_order)


def send_back(x: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
    """The inverse of :func:`send`: each rank gets what became of its rows."""
    sent, received = route.rank_sizes.tolist()
    return _exchange(_by_rank(x, route), received, sent, group).rows


def begin_sending(x: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
    """Begins :func:`send` and returns a placeholder for :func:`arrived`, whose rows are unsorted.

    The placeholder is (S, ...) and NaN, of which one element is stored: what reads it instead of
    what arrives is seen to be wrong.
    """
    sent, received = route.rank_sizes.tolist()
    return _placeholder(_exchange(x.contiguous(), sent, received, group, begin=True), route)


def begin_sending_back(x: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
    """Begins :func:`send_back`, and returns a placeholder as :func:`begin_sending` does."""
    sent, received = route.rank_sizes.tolist()
    return _placeholder(_exchange(_by_rank(x, route), received, sent, group, begin=True), route)


def arrived(x: Tensor) -> Tensor | None:
    """What an exchange that was begun brings, of its placeholder; None of any other tensor."""
    exchange: _Exchange | None = getattr(x, _MARK, None)
    if exchange is None:
        return None
    assert exchange.work is not None
    with unwatched("ranks exchange rows"):
        exchange.work.wait()
    return exchange.rows


class _Exchange(NamedTuple):
    """Rows that arrive, those sent, which have to live until then, and what to wait for."""

    rows: Tensor
    sent: Tensor
    work: dist.Work | None


_MARK = "_exchange_of_rows"


def _exchange(
    x: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup | None,
    *,
    begin: bool = False,
) -> _Exchange:
    # Also without rows of its own: the other ranks wait for this one.
    rows = x.new_empty((sum(received), *x.shape[1:]))
    with unwatched("ranks exchange rows"):
        work = dist.all_to_all_single(rows, x, received, sent, group=group, async_op=begin)
    return _Exchange(rows, x, work)


def _placeholder(exchange: _Exchange, route: Route) -> Tensor:
    shape = len(route.row_order), *exchange.rows.shape[1:]
    placeholder = exchange.rows.new_full((), math.nan).expand(shape)
    setattr(placeholder, _MARK, exchange)
    return placeholder


def _by_rank(x: Tensor, route: Route) -> Tensor:
    # Each row is written once: in any order.
    return torch.empty_like(x).index_copy_(0, route.row_order, x)

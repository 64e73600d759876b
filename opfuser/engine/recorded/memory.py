"""The calls of a recorded pass, with as few of them for memory and views as there can be.

Where kernels are launched by addresses, most calls of torch functions in a pass allocate or make
views, and each takes the host one to three microseconds. What is computed, and where tensors of
results lie, stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import torch_internals as internals
from ..plan import Step

# Around the names of tensors in texts. No text of a constant holds these characters: repr() of a
# string escapes them.
_BEGIN, _END = "\x01", "\x02"

# Bytes up to which an allocation is kept from call to call, if no result lies there: largest values
# and scales of tensors.
_SMALL = 16


def marked(name: str) -> str:
    """The name of a tensor, as texts of calls hold it."""
    return f"{_BEGIN}{name}{_END}"


def unmarked(text: str) -> str:
    """The text of a call as it is executed."""
    return text.replace(_BEGIN, "").replace(_END, "")


class Allocation(NamedTuple):
    """A call that allocates memory: :func:`torch.empty_strided` with these arguments."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        """What it returns."""
        how: Any = {"dtype": self.dtype, "device": self.device}
        return torch.empty_strided(self.shape, self.strides, **how)


class View(NamedTuple):
    """A call that returns a view, and nothing else.

    Attributes:
        base: the name of what it is a view of.
        offset: where it begins in that, in bytes.
        dtype: its dtype.
        alone: a call that allocates the like of it, and its text; None if it is not all of its
            base.
    """

    base: str
    offset: int
    dtype: torch.dtype
    alone: tuple[Allocation, str] | None


class Launched(NamedTuple):
    """A launch of a kernel; all that it reads is where tensors lie, and their dtypes.

    Attributes:
        by_addresses: whether it is given addresses, and no dtypes.
    """

    by_addresses: bool


class Several(NamedTuple):
    """A call whose results are all alike, and can be had together.

    Attributes:
        function: what returns several, as lines name it.
        argument: the text of the argument.
        each: whether it takes the arguments of all, which are there from the beginning; else the
            first one, and how many results it returns.
        device: of the results.
    """

    function: str
    argument: str
    each: bool
    device: torch.device


class Call(NamedTuple):
    """A call that was noted.

    Attributes:
        step: whose it is.
        text: of the call, with names of tensors as :func:`marked` returns them.
        reads: the names in it.
        results: names of what it returns, None for what is no tensor.
        unpacked: whether it returns several.
        effect: whether it does anything besides returning these.
        shares: names in it with whose memory that of a result is one.
        about: what is known of it, if it is one that :func:`frugal` may change.
    """

    step: Step | None
    text: str
    reads: tuple[str, ...]
    results: tuple[str | None, ...]
    unpacked: bool
    effect: bool
    shares: tuple[str, ...] = ()
    about: Allocation | View | Launched | Several | None = None


def frugal(calls: Sequence[Call], returned: Sequence[str], *, launches: bool) -> list[Call]:
    """Calls that do the same with fewer allocations and views.

    Args:
        calls: of a pass.
        returned: the names of its results.
        launches: whether kernels are launched by addresses.
    """
    found = _needed(calls, returned)
    if launches:
        found = _together(_by_addresses(found, returned))
    return _without_views(found, returned)


def _needed(calls: Sequence[Call], returned: Sequence[str]) -> list[Call]:
    """The calls without those that only return what nobody reads."""
    read, needed = set(returned), []
    for call in reversed(calls):
        if call.effect or not read.isdisjoint(call.results):
            read.update(call.reads)
            needed.append(call)
    return needed[::-1]


def _readers(calls: Sequence[Call]) -> dict[str, list[Call]]:
    readers: dict[str, list[Call]] = {}
    for call in calls:
        for name in dict.fromkeys(call.reads):
            readers.setdefault(name, []).append(call)
    return readers


def _is_by_addresses(call: Call) -> bool:
    return isinstance(call.about, Launched) and call.about.by_addresses


def _by_addresses(calls: list[Call], returned: Sequence[str]) -> list[Call]:
    """Has launches read views, which nobody else reads, from the addresses of their bases."""
    kept = set(returned)
    while True:
        readers = _readers(calls)
        places = {
            name: call.about
            for call in calls
            for name in call.results
            if isinstance(call.about, View)
            and name is not None
            and name not in kept
            and all(map(_is_by_addresses, readers.get(name, ())))
        }
        # Views of views: those at the end of such rows come first.
        if not places:
            return calls
        calls = _needed([_moved(call, places) for call in calls], returned)


def _moved(call: Call, places: dict[str, View]) -> Call:
    if not _is_by_addresses(call) or places.keys().isdisjoint(call.reads):
        return call
    text, reads = call.text, list(call.reads)
    for name, (base, offset, _, _) in places.items():
        if name in reads:
            address = f"{marked(base)}.data_ptr()" + (f" + {offset}" if offset else "")
            text = text.replace(f"{marked(name)}.data_ptr()", address)
            reads = [base if read == name else read for read in reads]
    return call._replace(text=text, reads=tuple(reads))


def _without_views(calls: list[Call], returned: Sequence[str]) -> list[Call]:
    """Allocates memory as the one view of it that anybody reads.

    A GEMM takes the transpose of codes that a kernel writes, whose launch reads the address alone.
    """
    readers = _readers(calls)
    views: dict[str, tuple[str, Allocation, str]] = {}
    for call in calls:
        if not isinstance(call.about, Allocation) or call.results[0] in returned:
            continue
        name = call.results[0] or ""
        launches = [c for c in readers.get(name, ()) if isinstance(c.about, Launched)]
        others = [c for c in readers.get(name, ()) if not isinstance(c.about, Launched)]
        if len(others) != 1 or not isinstance(others[0].about, View):
            continue
        (view,), (_, _, dtype, alone) = others[0].results, others[0].about
        fits = dtype is call.about.dtype or all(map(_is_by_addresses, launches))
        if fits and alone is not None and view is not None and view not in returned:
            views[name] = view, *alone
    dropped = {view for view, _, _ in views.values()}
    return [_of_view(call, views) for call in calls if dropped.isdisjoint(call.results)]


def _of_view(call: Call, views: dict[str, tuple[str, Allocation, str]]) -> Call:
    """The call that allocates the view in place of its base, or is given it."""
    (result,) = call.results[:1] or (None,)
    if result in views:
        view, about, text = views[result]
        return call._replace(text=text, results=(view,), about=about)
    text, reads = call.text, call.reads
    for name in views.keys() & set(reads):
        view, _, _ = views[name]
        text = text.replace(marked(name), marked(view))
        reads = tuple([view if read == name else read for read in reads])
    return call._replace(text=text, reads=reads)


def _together(calls: list[Call]) -> list[Call]:
    """Has one call return the results of all that can be had together."""
    alike: dict[tuple[str, torch.device], list[Call]] = {}
    for call in calls:
        if isinstance(call.about, Several):
            alike.setdefault((call.about.function, call.about.device), []).append(call)
    merged = {id(own[0]): _merged(own) for own in alike.values() if len(own) > 1}
    dropped = {id(call) for own in alike.values() for call in own[1:]}
    return [merged.get(id(call), call) for call in calls if id(call) not in dropped]


def _merged(calls: Sequence[Call]) -> Call:
    """The one call in place of several that are alike."""
    about = [call.about for call in calls if isinstance(call.about, Several)]
    function, first, each, _ = about[0]
    rest = [own.argument for own in about[1:]] if each else [str(len(about))]
    reads = tuple([name for call in calls for name in call.reads]) if each else calls[0].reads
    return calls[0]._replace(
        text=f"{function}({', '.join([first, *rest])})",
        reads=reads,
        results=tuple([name for call in calls for name in call.results]),
        unpacked=True,
    )


class Scratch:
    """Small memory of a pass, kept from call to call.

    What is there is written before it is read in every call, all of it on one stream. A call that
    begins while another one is under way, on another thread, gets memory of its own; so does each
    stream, and whatever is captured, since a graph would keep the addresses.

    Args:
        allocations: whose results are kept.
    """

    def __init__(self, allocations: Sequence[Allocation]) -> None:
        self._allocations = tuple(allocations)
        self._free: dict[int, list[tuple[Tensor, ...]]] = {}

    def __call__(self, stream: int) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, ...]]]:
        """The tensors, and the list to which they are appended at the end of the pass."""
        # The default stream, 0, is never captured; where there is no driver, asking is an error.
        if stream and internals.cuda_captures():
            return self._made(), []
        free = self._free.get(stream)
        if free is None:
            free = self._free.setdefault(stream, [])
        try:
            return free.pop(), free
        except IndexError:
            return self._made(), free

    def _made(self) -> tuple[Tensor, ...]:
        with torch.inference_mode(False):  # calls outside of that mode write to them, too
            return tuple([allocation.make() for allocation in self._allocations])


def scratch_of(
    calls: Sequence[Call], returned: Sequence[str]
) -> tuple[list[Call], tuple[str, ...], Scratch]:
    """Calls without small allocations of which no result is a part; their names; their memory."""
    kept = {*returned, *[name for call in calls for name in call.shares]}
    small = {
        name: call.about
        for call in calls
        for name in call.results[:1]
        if isinstance(call.about, Allocation)
        and name is not None
        and name not in kept
        and torch.Size(call.about.shape).numel() * call.about.dtype.itemsize <= _SMALL
    }
    left = [call for call in calls if not small.keys() & call.results]
    return left, tuple(small), Scratch(list(small.values()))

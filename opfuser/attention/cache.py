"""Keys and values of earlier calls.

A call that is refused, or fails, must leave them as they were: the caller does what the error says
and calls again. So keys are stored last. :func:`extended` returns all keys and values while the
cache is still the one from before, and :attr:`Extended.keep` stores them: after the output of the
operation, or where a Sequential was given the cache, after that of the sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, CacheFullError, InputError, NotSupportedError
from ..runtime.recording import refuse_watching, seen_whole
from ..runtime.tracing import stands_in

_FIRST_ROOM = 64  # positions; then it doubles


def _nothing() -> None:
    pass


class Extended(NamedTuple):
    """Keys and values of a cache and of a call.

    Attributes:
        keys, values: (B, K, T, D) and (B, K, T, V).
        start: position of the first key of the call, a 0-d integer tensor, if there is room for
            later ones behind the last; None otherwise.
        keep: stores those of the call; does nothing where that is done.
    """

    keys: Tensor
    values: Tensor
    start: Tensor | None
    keep: Callable[[], None] = _nothing


class StoresLast:
    """A cache that stores keys and values when it is told that a call has its output."""

    def extended(self, k: Tensor, v: Tensor) -> Extended:
        """Returns the keys and values of the cache and of a call; ``keep`` stores the latter."""
        raise NotImplementedError

    def state(self) -> Hashable:
        """Returns all that the layout of what ``extended`` returns, and its errors, depend on.

        Less what it is given, and what its errors say of lengths. None: no other call has the same,
        or it is not known.
        """
        return None


class KVCache(StoresLast):
    """Keys and values that one attention operation has seen, for generation without gradients.

    It is passed to each call: ``op(x, cache=cache)``, or through ``op_kwargs`` of a sequence. A
    call appends its keys and values and attends to all that are kept. Queries are the last
    positions.

    Without ``max_length`` the cache grows, and a call sees as many keys as there are: the kernels
    of prefill and decode are those of any other call. With it, memory is allocated at the first
    call and never again, and :attr:`length` is a tensor on the device. Every decode step then has
    the same shapes, as ``torch.compile`` and CUDA graphs want them; those positions that are not
    filled yet are masked, and cost as much as others. Beyond ``max_length``, a call on a CPU raises
    ``CacheFullError``, compiled code ``IndexError``; a GPU stops with an assertion, since checking
    would wait for it.

    A call that raises stores nothing; nor does a call of a ``Sequential`` whose ``op_kwargs`` have
    the cache, whatever raises in it.

    Args:
        max_length: positions to allocate; None grows.

    Attributes:
        length: positions that are kept: an int, or a 0-d int64 tensor with ``max_length``.
        start: position of the first key of the last call, which is that of its first query if
            there are as many, a 0-d int64 tensor; None without ``max_length``.

    Raises:
        ArgumentError: if ``max_length`` is not positive.
        InputError: in a call, if batch, heads, head size, dtype or device are not those of the
            first call, or keys and values do not belong together.
        CacheFullError: in a call, if more than ``max_length`` positions would be kept.
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise ArgumentError.explained(
                "max_length must be positive or None",
                where="KVCache",
                received=f"max_length={max_length}",
            )
        self.max_length = max_length
        self.length: int | Tensor = 0
        self.start: Tensor | None = None
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def reset(self) -> None:
        """Forgets all positions and keeps the memory."""
        if isinstance(self.length, Tensor):
            self.length.zero_()
            for kept in (self._k, self._v):  # weights of 0 do not hide what is not finite
                if kept is not None:
                    kept.zero_()
        else:
            self.length = 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys (B, K, S, D) and values (B, K, S, V); returns all, with their memory.

        With ``max_length`` these are ``max_length`` positions, of which the first ``start + S``
        are filled and the others 0.
        """
        more = self.extended(k, v)
        more.keep()
        return more.keys, more.values

    def extended(self, k: Tensor, v: Tensor) -> Extended:
        """Returns what :meth:`update` does, and leaves storing it to ``keep``.

        Until then no more than memory behind the last position is written to.
        """
        self._check(k, v)
        if self.max_length is None:
            return self._grown(k, v)
        count = k.shape[2]
        length = self.length if isinstance(self.length, Tensor) else _zero(k)
        start = _zero(k) if self.start is None else self.start
        keys = _zeros(k, self.max_length) if self._k is None else self._k
        values = _zeros(v, self.max_length) if self._v is None else self._v
        positions = length + torch.arange(count, device=k.device)
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)

        def keep() -> None:
            self._k, self._v, self.length, self.start = keys, values, length, start
            start.copy_(length)
            length.add_(count)

        return Extended(keys, values, length, keep)

    def state(self) -> Hashable:
        grows = self.max_length is None
        if type(self) is not KVCache or (grows and self.length):
            return None
        rows = [None if t is None else (t.shape, t.dtype, t.device) for t in (self._k, self._v)]
        return KVCache, self.max_length, *rows

    def _grown(self, k: Tensor, v: Tensor) -> Extended:
        before = self.length
        assert isinstance(before, int)
        after = before + k.shape[2]
        keys, values = self._k, self._v
        if keys is None or values is None or keys.shape[2] < after:
            room = max(_FIRST_ROOM, after, 2 * before)
            grown = [_zeros(t, room) for t in (k, v)]
            for new, old in zip(grown, (keys, values)):
                if old is not None:
                    new[:, :, :before] = old[:, :, :before]
            keys, values = grown
        for kept, new in ((keys, k), (values, v)):
            kept[:, :, before:after] = new

        def keep() -> None:
            self._k, self._v, self.length = keys, values, after

        return Extended(keys[:, :, :after], values[:, :, :after], None, keep)

    def _check(self, k: Tensor, v: Tensor) -> None:
        four = k.dim() == v.dim() == 4
        for name, kept, new in (("keys", self._k, k), ("values", self._v, v)):
            if four and kept is not None and _kind(kept) != _kind(new):
                shape, size, dtype, device = _kind(kept)
                raise InputError.explained(
                    f"The {name} of a cache have one batch, number of heads, head size, dtype "
                    f"and device: {tuple(shape)}, {size}, {dtype}, {device}",
                    where="KVCache",
                    received=f"{tuple(new.shape)} of {new.dtype} on {new.device}",
                    remedy="Make a cache for each batch, or for each operation",
                )
        if not four or k.shape[:3] != v.shape[:3]:
            raise InputError.explained(
                "Keys and values have one batch, number of heads and number of positions",
                where="KVCache",
                received=f"keys {tuple(k.shape)}, values {tuple(v.shape)}",
                remedy="Pass keys (B, K, S, D) and values (B, K, S, V)",
            )
        count, filled = k.shape[2], _known(self.length)
        if self.max_length is not None and filled + count > self.max_length:
            raise CacheFullError.explained(
                "A cache keeps no more than max_length positions",
                where="KVCache",
                received=f"{count} positions, max_length={self.max_length}"
                + (f", of which {filled} are filled" if filled else ""),
                remedy="Make it longer, pass KVCache(), which grows, or call reset()",
            )


class PendingCache(StoresLast):
    """A cache in a call of a sequence, which stores keys when the sequence has its output.

    What else is asked of it, the cache answers.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._keep: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        refuse_watching("a cache is asked for more than keys and values")
        return getattr(self._cache, name)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns all keys and values."""
        more = self.extended(k, v)
        return more.keys, more.values

    def extended(self, k: Tensor, v: Tensor) -> Extended:
        """Returns all keys and values; its ``keep`` does nothing."""
        return Extended(*append(self, k, v))

    def state(self) -> Hashable:
        cache = self._cache
        if isinstance(cache, StoresLast):
            return None if _has_own_update(cache) else cache.state()
        return state_of_layer(cache) if is_replacing(cache) else None

    def take(self, k: Tensor, v: Tensor) -> Extended:
        """Returns what the cache does, and has its ``keep`` for later."""
        if self._keep is not None:
            raise InputError.explained(
                "A cache belongs to one operation, which a sequence calls once",
                where="KVCache",
                received="a second call in one call of a sequence",
                remedy="Make a cache for each operation, and an operation for each call",
            )
        if isinstance(self._cache, PendingCache):  # of the sequence around, which stores later
            self._keep = _nothing
            return self._cache.take(k, v)
        more = extended(self._cache, k, v)
        self._keep = more.keep
        return more

    def keep(self) -> None:
        """Stores the keys and values of the call, if there were any."""
        if self._keep is not None:
            self._keep()


@seen_whole(reads=True)
def append(cache: PendingCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns all keys and values, and the start, as of :class:`Extended`."""
    more = cache.take(k, v)
    return more.keys, more.values, more.start


def pending_of(cache: Any, pending: list[PendingCache]) -> PendingCache:
    """Returns the one of ``pending`` that stands for the cache, to which it is added if need be."""
    for known in pending:
        if known._cache is cache:
            return known
    pending.append(PendingCache(cache))
    return pending[-1]


def extended(cache: Any, k: Tensor, v: Tensor) -> Extended:
    """Returns the keys and values of any cache, with those of a call.

    Those that :class:`StoresLast` marks, and layers of transformers' that replace their tensors,
    are unchanged until ``keep``; ``update`` of others stores at once.

    Raises:
        NotSupportedError: the cache returns positions that are not filled, and does not say which.
    """
    if isinstance(cache, StoresLast) and not _has_own_update(cache):
        return cache.extended(k, v)
    start = getattr(cache, "start", None)
    if start is None and getattr(cache, "is_compileable", False):
        raise NotSupportedError.explained(
            "A cache that returns positions which are not filled must say where queries begin",
            where="DotProductAttention",
            received=type(cache).__name__,
            remedy="Pass KVCache(max_length)",
        )
    if is_replacing(cache) and not stands_in(k):
        return extended_copy(cache, k, v)
    keys, values = cache.update(k, v)
    return Extended(keys, values, getattr(cache, "start", None))


def extended_copy(layer: Any, k: Tensor, v: Tensor) -> Extended:
    """Returns the keys and values of a layer whose ``update`` replaces tensors, and writes to none.

    A shallow copy is updated; ``keep`` hands its attributes to the layer.
    """
    updated = copy.copy(layer)
    keys, values = updated.update(k, v)
    return Extended(keys, values, None, lambda: vars(layer).update(vars(updated)))


def state_of_layer(layer: Any) -> Hashable:
    """Returns the state, as of :class:`StoresLast`, of a layer as of :func:`is_replacing`.

    One with tensors, other than numbers on the host, has keys, which are more in the next call.
    """
    own = vars(layer)
    if _COMPARED.issuperset(map(type, own.values())):
        return type(layer), *own.items()
    numbers = {name: t.item() for name, t in own.items() if isinstance(t, Tensor) and _is_number(t)}
    plain = own | numbers
    return (
        (type(layer), *plain.items()) if _COMPARED.issuperset(map(type, plain.values())) else None
    )


def _is_number(t: Tensor) -> bool:
    return t.is_cpu and not t.dim()


_COMPARED = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))


def _has_own_update(cache: Any) -> bool:
    """Whether a subclass has another ``update`` than that which ``extended`` is a part of."""
    return isinstance(cache, KVCache) and type(cache).update is not KVCache.update


def is_of_transformers(cache: Any) -> bool:
    """Whether ``update`` is one of transformers' own."""
    module: str = getattr(getattr(type(cache), "update", None), "__module__", "")
    return module.startswith("transformers.")


def is_replacing(layer: Any) -> bool:
    """Whether this is a layer of transformers' whose ``update`` replaces its tensors."""
    return is_of_transformers(layer) and not getattr(layer, "is_compileable", False)


def _known(length: int | Tensor) -> int:
    """The length; 0 where reading it would wait for a device, or end a graph."""
    if not isinstance(length, Tensor):
        return length
    return int(length) if length.is_cpu and not stands_in(length) else 0


def _kind(t: Tensor) -> tuple[torch.Size, int, torch.dtype, torch.device]:
    return t.shape[:2], t.shape[3], t.dtype, t.device


def _zeros(like: Tensor, length: int) -> Tensor:
    """Room for so many positions; zeros, since weights of 0 do not hide what is not finite."""
    return _lasting_zeros(like, (*like.shape[:2], length, like.shape[3]), like.dtype)


def _zero(like: Tensor) -> Tensor:
    return _lasting_zeros(like, (), torch.int64)


def _lasting_zeros(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if stands_in(like):
        return like.new_zeros(shape, dtype=dtype)
    with torch.inference_mode(False):  # so that later calls outside of it may write to them
        return torch.zeros(shape, dtype=dtype, device=like.device)

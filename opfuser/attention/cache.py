"""Keys and values of earlier calls."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, InputError, explain

__all__ = ["KVCache"]

_FIRST_ROOM = 64  # positions; then it doubles


class KVCache:
    """Keys and values that one attention operation has seen, for generation without gradients.

    It is passed to each call: ``op(x, cache=cache)``, or through ``op_kwargs`` of a sequence. A
    call appends its keys and values and attends to all that are kept. Queries are the last
    positions.

    Without ``max_length`` the cache grows, and a call sees as many keys as there are: the kernels
    of prefill and decode are those of any other call. With it, memory is allocated at the first
    call and never again, and :attr:`length` is a tensor on the device. Every decode step then has
    the same shapes, as ``torch.compile`` and CUDA graphs want them; those positions that are not
    filled yet are masked, and cost as much as others. Beyond ``max_length``, a call on a CPU raises
    ``IndexError``; a GPU stops with an assertion, since checking would wait for it.

    Args:
        max_length: positions to allocate; None grows.

    Attributes:
        length: positions that are kept: an int, or a 0-d int64 tensor with ``max_length``.
        start: position of the first query of the last call, a 0-d int64 tensor; None without
            ``max_length``.

    Raises:
        ArgumentError: if ``max_length`` is not positive.
        InputError: in a call, if batch, heads, head size, dtype or device are not those of the
            first call, or it has more than ``max_length`` positions.
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise ArgumentError(
                explain(
                    "max_length must be positive or None",
                    where="KVCache",
                    received=f"max_length={max_length}",
                )
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
        else:
            self.length = 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys (B, K, S, D) and values (B, K, S, V); returns all, with their memory.

        With ``max_length`` these are ``max_length`` positions, of which the first ``start + S``
        are filled and the others 0.
        """
        self._check(k, v)
        if self.max_length is None:
            return self._grow(k, v)
        if self._k is None or self._v is None:
            self._k, self._v = (_zeros(t, self.max_length) for t in (k, v))
            self.length, self.start = (_zero(k) for _ in range(2))
        assert isinstance(self.length, Tensor)
        assert self.start is not None
        self.start.copy_(self.length)
        self.length.add_(k.shape[2])
        positions = self.start + torch.arange(k.shape[2], device=k.device)
        self._k.index_copy_(2, positions, k)
        self._v.index_copy_(2, positions, v)
        return self._k, self._v

    def _grow(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        before = self.length
        assert isinstance(before, int)
        after = before + k.shape[2]
        if self._k is None or self._v is None or self._k.shape[2] < after:
            room = max(_FIRST_ROOM, after, 2 * before)
            grown = [_zeros(t, room) for t in (k, v)]
            for new, old in zip(grown, (self._k, self._v)):
                if old is not None:
                    new[:, :, :before] = old[:, :, :before]
            self._k, self._v = grown
        self.length = after
        for kept, new in ((self._k, k), (self._v, v)):
            kept[:, :, before:after] = new
        return self._k[:, :, :after], self._v[:, :, :after]

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, kept, new in (("keys", self._k, k), ("values", self._v, v)):
            if kept is not None and _kind(kept) != _kind(new):
                shape, size, dtype, device = _kind(kept)
                raise InputError(
                    explain(
                        f"The {name} of a cache have one batch, number of heads, head size, dtype "
                        f"and device: {tuple(shape)}, {size}, {dtype}, {device}",
                        where="KVCache",
                        received=f"{tuple(new.shape)} of {new.dtype} on {new.device}",
                        remedy="Make a cache for each batch, or for each operation",
                    )
                )
        if self.max_length is not None and k.shape[2] > self.max_length:
            raise InputError(
                explain(
                    "A call must not have more positions than max_length",
                    where="KVCache",
                    received=f"{k.shape[2]} positions, max_length={self.max_length}",
                )
            )


def _kind(t: Tensor) -> tuple[torch.Size, int, torch.dtype, torch.device]:
    return t.shape[:2], t.shape[3], t.dtype, t.device


def _zeros(like: Tensor, length: int) -> Tensor:
    """Room for so many positions; zeros, since weights of 0 do not hide what is not finite."""
    shape = *like.shape[:2], length, like.shape[3]
    if torch.compiler.is_compiling():
        return like.new_zeros(shape)
    with torch.inference_mode(False):  # so that later calls outside of it may write to them
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _zero(like: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return like.new_zeros((), dtype=torch.int64)
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.int64, device=like.device)

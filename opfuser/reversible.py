"""Changes that whoever made them can take back, in any order, without undoing those of others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["ReversibleChanges"]

T = TypeVar("T")


class ReversibleChanges(Generic[T]):
    """Changes in the order in which they were made.

    Args:
        merged: one change that does what two in a row do. Those that nobody can take back any more
            are merged, so that they do not pile up.
    """

    def __init__(self, merged: Callable[[T, T], T]) -> None:
        self._merged = merged
        self._made: list[tuple[weakref.ref[object] | None, T]] = []

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[T]:
        return iter([change for _, change in self._made])

    def add(self, owner: object, change: T) -> None:
        """Adds a change that is for good if ``owner`` is None, or once it is gone."""
        self._made.append((None if owner is None else weakref.ref(owner), change))
        self._merge()

    def take_back(self, owner: object) -> None:
        """Removes the changes of ``owner``, and nothing else."""
        self._made = [made for made in self._made if made[0] is None or made[0]() is not owner]
        self._merge()

    def _merge(self) -> None:
        kept: list[tuple[weakref.ref[object] | None, T]] = []
        for ref, change in self._made:
            owner = None if ref is None or ref() is None else ref
            if owner is None and kept and kept[-1][0] is None:
                kept[-1] = None, self._merged(kept[-1][1], change)
            else:
                kept.append((owner, change))
        self._made = kept

"""Loops over the rows of a tensor whose number is known in a call alone."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .reads import is_scalar

__all__ = ["Turns"]

_OWN = __name__.rpartition(".")[0]


class Turns:
    """Gives the rows of a tensor to a loop, one by one.

    What a loop does may depend on how many turns there were, by a number or a list that it keeps:
    that is noted as an effect.

    Args:
        rows: a stand-in.
        count: how many there are.
        note_effect: is told of it, as a predicate.
    """

    def __init__(self, rows: Tensor, count: int, note_effect: Callable[[str], None]) -> None:
        self.rows, self.count, self.note_effect = rows, count, note_effect

    def __iter__(self) -> Iterator[Tensor]:
        before: dict[Any, Any] = {}
        for number in range(self.count):
            before = self._after_turn(before, sys._getframe(1))
            yield self.rows.select(0, number)
        self._after_turn(before, sys._getframe(1))

    def _after_turn(self, before: dict[Any, Any], frame: types.FrameType) -> dict[Any, Any]:
        kept = _kept_in(frame)
        if any(kept.get(name) != value for name, value in before.items()):
            self.note_effect("counts the turns of a loop")
        return kept


def _kept_in(frame: types.FrameType | None) -> dict[Any, Any]:
    """The numbers, texts and lengths that the functions of a forward hold, by name."""
    kept: dict[Any, Any] = {}
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_OWN):
        for name, value in frame.f_locals.items():
            if is_scalar(value):
                kept[id(frame), name] = type(value), repr(value)
            elif isinstance(value, (list, dict, set)):
                kept[id(frame), name] = type(value), len(value)
        frame = frame.f_back
    return kept

"""Loops over the rows of a tensor whose number is known in a call alone."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .reads import is_scalar

_OWN = __name__.rpartition(".")[0]


def turns(rows: Tensor, count: int, note_effect: Callable[[str], None]) -> Iterator[Tensor]:
    """The rows of a tensor, for a loop.

    What a loop does may depend on how many turns there were, by a number or a list that it keeps:
    that is noted as an effect.

    Args:
        rows: a stand-in.
        count: how many there are.
        note_effect: is told of it, as a predicate.
    """
    before: dict[Any, Any] = {}
    for number in range(count + 1):
        kept = _kept_in(sys._getframe(1))
        if any(kept.get(name) != value for name, value in before.items()):
            note_effect("counts the turns of a loop")
        before = kept
        if number < count:
            yield rows.select(0, number)


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

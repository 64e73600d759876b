"""Random numbers that a trace draws, which are drawn again afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

__all__ = ["DRAWS", "GENERATORS", "numpy_state", "state_of"]

DRAWS = "draws random numbers"
# What draws by methods that are seen when they are called, by the thread of the trace alone.
GENERATORS = random.Random, torch.Generator


def state_of(generator: random.Random | torch.Generator) -> Callable[[], object]:
    """A function after which a generator goes on as it would now."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


@contextmanager
def numpy_state(note_effect: Callable[[str], None]) -> Iterator[None]:
    """Afterwards, NumPy's random numbers go on as if nothing had been traced.

    Which thread draws them cannot be seen.
    """
    numpy: Any = sys.modules.get("numpy.random")
    before = numpy and numpy.get_state()
    try:
        yield
    finally:
        if numpy and _comparable(numpy.get_state()) != _comparable(before):
            numpy.set_state(before)
            note_effect(DRAWS)


def _comparable(state: Any) -> Any:
    return state[1].tolist(), *state[2:]

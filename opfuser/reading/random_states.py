"""The states of Python's, NumPy's and torch's random numbers around a trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["random_states"]


@contextmanager
def random_states(note_effect: Callable[[str], None]) -> Iterator[None]:
    """Afterwards, random numbers go on as if nothing had been traced."""
    numpy = sys.modules.get("numpy.random")

    def states() -> tuple[Any, ...]:
        of_numpy = numpy.get_state() if numpy is not None else None
        return random.getstate(), torch.get_rng_state(), of_numpy

    def comparable(states: tuple[Any, ...]) -> tuple[Any, ...]:
        python, tensor, of_numpy = states
        return python, tensor.tolist(), of_numpy and (of_numpy[1].tolist(), *of_numpy[2:])

    before = states()
    try:
        yield
    finally:
        if comparable(states()) != comparable(before):
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            if numpy is not None:
                numpy.set_state(before[2])
            note_effect("draws random numbers")

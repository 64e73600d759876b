"""Random numbers that a trace draws, and that are drawn again afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch

__all__ = ["GENERATORS", "state_of"]

# What draws by methods that are seen when they are called, and by which thread. Those of NumPy are
# not, and are of types of which a forward that reads one is kept.
GENERATORS = random.Random, torch.Generator


def state_of(generator: random.Random | torch.Generator) -> Callable[[], object]:
    """A function after which a generator goes on as it would now."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())

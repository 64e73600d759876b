"""Parametrized parameters, whose value is computed at every read.

Within a call, the engine and the operations must read the same value, or its gradient is lost.
``torch.nn.utils.parametrize.cached`` ensures that for all threads and modules at once: values
computed by a thread that evaluates without gradients would reach one that trains.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from ..errors import NotSupportedError


class _Known(threading.local):
    """Values computed in this thread's current call; None outside of calls."""

    values: dict[tuple[int, str], Tensor] | None = None


_known = _Known()


@contextmanager
def one_value_each() -> Iterator[None]:
    """Within it, this thread computes each parameter of :func:`read_through` once."""
    outer = _known.values
    if outer is None:
        _known.values = {}
    try:
        yield
    finally:
        _known.values = outer


def read_through(module: nn.Module, name: str) -> None:
    """Makes :func:`one_value_each` apply to a parametrized parameter."""
    cls = type(module)  # torch derives one per parametrized module, which has the property
    computes = vars(cls)[name]
    if computes.fget.__module__ == __name__:
        return

    def value(self: nn.Module) -> Tensor:
        values = _known.values
        if values is None:
            return cast(Tensor, computes.fget(self))
        found = values.get((id(self), name))
        if found is None:
            found = values[id(self), name] = computes.fget(self)
        return found

    setattr(cls, name, property(value, computes.fset))


def fake_value(module: nn.Module, name: str) -> Tensor:
    """The value of a parametrized parameter, computed by a copy of the parametrization.

    The state of the original and of torch's random generators does not change.
    """
    parametrization = _copy(module, name)
    devices = {t.device for t in parametrization.parameters() if t.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        return cast(Tensor, parametrization())


def refuse_impure(module: nn.Module, name: str) -> None:
    """Raises NotSupportedError for a parametrization with random numbers or state of its own.

    Traced code evaluates it once for the engine and once for the operation; both must agree.
    """
    rehearsal = _copy(module, name)
    written = [buffer._version for buffer in rehearsal.buffers()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        once, again = rehearsal(), rehearsal()
    if written != [b._version for b in rehearsal.buffers()] or not torch.equal(once, again):
        raise NotSupportedError.explained(
            "A parametrization that is compiled gives the same value whenever it is evaluated",
            where=f"{name} of {type(module).__name__}",
            received="one that draws random numbers, or writes to a buffer",
            remedy="Leave the sequence out of torch.compile, or remove the parametrization",
        )


def _copy(module: nn.Module, name: str) -> nn.Module:
    return copy.deepcopy(cast(nn.ModuleDict, module.parametrizations)[name])

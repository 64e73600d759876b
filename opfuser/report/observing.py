"""Which Sequentials a model calls, and what their calls follow."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ..engine.plan import Plan
from ..errors import ArgumentTypeError
from ..sequential import Sequential

__all__ = ["SequenceCall", "observed"]


class SequenceCall(NamedTuple):
    """One call of a Sequential inside a model.

    Attributes:
        path: of the Sequential in the model, "" for the model itself; of one that the model holds
            without registering it, that of the module which called it.
        sequence: which was called.
        inputs: its input and extra inputs.
        plan: what the call followed.
    """

    path: str
    sequence: Sequential
    inputs: tuple[Tensor, ...]
    plan: Plan


@contextmanager
def observed(model: nn.Module) -> Iterator[list[SequenceCall]]:
    """Collects the calls of Sequentials inside; the list is complete, and in order, at the end."""
    paths = {id(m): path for path, m in model.named_modules()}
    active: list[tuple[int, nn.Module]] = []
    count = itertools.count()
    began: list[int] = []
    found: list[SequenceCall] = []
    seen: set[int] = set()
    taken: set[str] = set()

    # Hooks for all modules: those of one module would keep it from being fused.
    def enter(module: nn.Module, args: Any) -> None:
        active.append((next(count), module))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        number, _ = active.pop()
        if not isinstance(module, Sequential) or id(module) in seen or output is None:
            return
        caller = active[-1][1] if active else None
        if isinstance(caller, Sequential) and not caller.overrides_forward():
            return
        try:
            plan = module.last_plan
        except ArgumentTypeError:  # it holds no operations
            return
        if plan is None:
            return
        seen.add(id(module))
        owner = next(
            (m for m in (module, *(m for _, m in reversed(active))) if id(m) in paths), model
        )
        path = _distinct(paths.get(id(owner), ""), taken)
        # A call ends after those inside of it.
        at = bisect_left(began, number)
        began.insert(at, number)
        found.insert(at, SequenceCall(path, module, tuple(args), plan))

    handles = (
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _distinct(path: str, taken: set[str]) -> str:
    name, count = path, 1
    while name in taken:
        count += 1
        name = f"{path}#{count}"
    taken.add(name)
    return name

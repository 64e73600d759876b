"""Which Sequentials a model calls, and what their calls follow."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..engine.plan import Plan
from ..errors import ArgumentTypeError
from ..sequential import Sequential
from ..torch_internals import modules_called_by


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

    def enter(module: nn.Module) -> None:
        active.append((next(count), module))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
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

    with calls_seen(enter, leave):
        yield found


@contextmanager
def calls_seen(
    enter: Callable[[nn.Module], None], leave: Callable[[nn.Module, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Inside, functions are told of all calls of modules.

    Not by hooks: those of a module would keep it from being fused, those of all modules from being
    computed by what ``opfuser.apply`` made.

    Args:
        enter: is given the module.
        leave: is given the module, its positional arguments, and its result, or None if it raised.
    """

    def told(original: Callable[..., Any]) -> Callable[..., Any]:
        def seen(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            enter(module)
            output = None
            try:
                output = original(module, *args, **kwargs)
            finally:
                leave(module, args, output)
            return output

        return seen

    with modules_called_by(told):
        yield


def _distinct(path: str, taken: set[str]) -> str:
    name, count = path, 1
    while name in taken:
        count += 1
        name = f"{path}#{count}"
    taken.add(name)
    return name

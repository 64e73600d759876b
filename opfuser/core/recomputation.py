"""Which part of a model a call belongs to that is computed twice, and which time it is.

A checkpoint runs its function in forward, keeps no more than the inputs, and runs it again in
backward. Both runs see one object, by which what the second one needs of the first can be found:

- of ``torch.utils.checkpoint`` without re-entry the frame, which its hooks of saved tensors refer
  to; they are on torch's stack of such hooks while either runs;
- of an ``autograd.Function`` whose forward calls the function and whose backward calls it again,
  as the re-entrant checkpoint of torch and those of other libraries, its context: an argument of
  either on the stack of Python.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import chain, takewhile
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from ..runtime import is_own
from ..torch_internals import (
    all_saved_tensors_hooks,
    graph_task,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks,
)


class Part(NamedTuple):
    """A part of a model that a checkpoint computes.

    Attributes:
        key: the object that both times see.
        again: whether it is being computed again.
        time: which time of possibly several: the number of the backward pass, usually.
    """

    key: object
    again: bool
    time: object = None


def in_backward() -> bool:
    """Whether autograd is running in this thread."""
    return graph_task() != -1


def is_outside() -> bool:
    """Whether the caller is in no backward pass and no part: the usual case, at the least price."""
    return graph_task() == -1 and saved_tensors_hooks(False) is None and torch.is_grad_enabled()


def computed_again() -> Part | None:
    """The part that the caller computes again; the innermost, where such parts are nested."""
    if graph_task() == -1 and saved_tensors_hooks(False) is None:  # the usual case
        return None
    functions = _functions() if in_backward() else iter(())
    return next((part for part in chain(_hooked(), functions) if part.again), None)


def parts_under_way() -> list[object]:
    """The keys of the parts that the caller computes and that may be computed again later."""
    # What a function's backward computes again, its forward has computed without grad.
    functions = not torch.is_grad_enabled()
    if not functions and saved_tensors_hooks(False) is None:  # the usual case
        return []
    found = list(takewhile(_is_first, _hooked()))
    if functions:
        found += takewhile(_is_first, _functions())
    return [part.key for part in found]


def _is_first(part: Part) -> bool:
    return not part.again


_Hooks = tuple[Callable[..., Any], Callable[..., Any]]


def _hooked() -> Iterator[Part]:
    """What checkpoints without re-entry compute around the caller, the innermost first."""
    for hooks in _hooks():
        pack = inspect.unwrap(hooks[0])
        if pack.__module__ != "torch.utils.checkpoint":
            continue
        cells = zip(pack.__code__.co_freevars, pack.__closure__ or ())
        refers = {name: cell.cell_contents for name, cell in cells}
        if "frame" in refers:
            yield Part(refers["frame"], again=False)
        elif "target_frame_ref" in refers:
            yield Part(refers["target_frame_ref"](), again=True, time=refers["gid"])


def _hooks() -> list[_Hooks]:
    """Hooks of saved tensors in this thread, the innermost first."""
    found: list[_Hooks] = []
    try:
        # torch shows the innermost alone.
        while (hooks := all_saved_tensors_hooks(False)) is not None:
            found.append(hooks)
            pop_saved_tensors_hooks()
    finally:
        for hooks in reversed(found):
            push_saved_tensors_hooks(*hooks)
    return found


def _functions() -> Iterator[Part]:
    """What functions of others compute around the caller, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _PASSES and code.co_argcount and code.co_varnames[0] != "self":
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, FunctionCtx) and not is_own(frame.f_globals.get("__name__")):
                yield Part(context, again=code.co_name == "backward", time=graph_task())
        frame = frame.f_back


_PASSES = frozenset({"forward", "backward"})

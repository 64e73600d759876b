"""Changes of the parameters and attributes of a module's operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..op import BasicOperation

NUMBERS = (int, float)
REFUSED = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
SETTINGS = (int, float, bool, str, type(None))


def attributes(module: nn.Module, kinds: tuple[type, ...]) -> dict[str, Any]:
    """The public attributes of basic operations that have one of these types, by path."""
    out = {}
    for path, op in module.named_modules():
        if not isinstance(op, BasicOperation):
            continue
        settable = [
            name
            for cls in type(op).__mro__
            for name, member in vars(cls).items()
            if isinstance(member, property) and member.fset is not None
        ]
        for name in (*vars(op), *settable):
            if not name.startswith("_") and name != "training":
                value = getattr(op, name)
                if type(value) in kinds:
                    out[f"{path}.{name}".lstrip(".")] = value
    return out


def other(value: Any) -> Any:
    """Another value of the type; a number in place of None."""
    if value is None:
        return 2
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return f"not {value}"
    if not math.isfinite(value):
        return 0.25
    # A probability stays a probability, and a tiny number becomes large enough to matter.
    return value / 2 if abs(value) > 0.3 else value + 0.3


def assign(module: nn.Module, path: str, value: Any) -> bool:
    """Sets an attribute; False if that raises."""
    owner, _, name = path.rpartition(".")
    try:
        setattr(module.get_submodule(owner), name, value)
    except REFUSED:
        return False
    return True


def _moved(t: Tensor) -> Tensor:
    return t.detach() * 1.5 + 0.25


def change_parameters(module: nn.Module) -> None:
    """Changes the values of parameters and floating-point buffers in place."""
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            if t.is_floating_point():
                t.copy_(_moved(t))


def replace_parameters(module: nn.Module) -> Callable[[], None]:
    """Replaces all parameters by new ones with other values; returns a function that undoes it.

    A parameter that several operations share is replaced by one that they share.
    """
    new: dict[int, nn.Parameter] = {}
    replaced = []
    for owner in module.modules():
        for name, old in list(owner._parameters.items()):
            # A compound and its operations share one dictionary: it may be replaced already.
            if old is not None and not any(old is made for made in new.values()):
                if id(old) not in new:
                    new[id(old)] = nn.Parameter(_moved(old), requires_grad=old.requires_grad)
                setattr(owner, name, new[id(old)])
                replaced.append((owner, name, old))

    def restore() -> None:
        for owner, name, old in replaced:
            setattr(owner, name, old)

    return restore


@contextmanager
def changed(module: nn.Module, *, replaces: bool, sets: str) -> Iterator[None]:
    """Inside, all parameters are replaced, or the attribute ``sets`` has another value."""
    restore = replace_parameters(module) if replaces else None
    before = attributes(module, SETTINGS).get(sets) if sets else None
    done = bool(sets) and assign(module, sets, other(before))
    try:
        yield
    finally:
        if restore is not None:
            restore()
        if done:
            assign(module, sets, before)

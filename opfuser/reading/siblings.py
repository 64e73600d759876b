"""Whether another module's forward would read the same as one that was traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .reads import HOOKS, MISSING, Reads, contents, is_scalar, unchanged

__all__ = ["sibling_reads"]

_SLOTS = "__dict__", "_parameters", "_buffers", "_modules"


def sibling_reads(reads: Reads, module: nn.Module) -> Reads | None:
    """What ``module``'s forward reads, if it is the same as was read of another module, else None.

    It is the same if both have children of the same types at the same paths, with parameters of the
    same shapes and dtypes that are shared in the same way, and if each attribute that was read has
    the same value, or is the corresponding child, parameter or buffer. Then the trace of one is the
    trace of both, with the parameters and buffers of ``module`` at the same paths.

    The number of a layer may differ where a cache alone was told of it.
    """
    mine = dict(reads.module.named_modules(remove_duplicate=False))
    theirs = dict(module.named_modules(remove_duplicate=False))
    if mine.keys() != theirs.keys() or _tensors(mine) != _tensors(theirs):
        return None
    translation: dict[int, Any] = {}
    for path, m in mine.items():
        if type(m) is not type(theirs[path]):
            return None
        translation[id(m)] = theirs[path]
        for slot in _SLOTS:
            translation[id(getattr(m, slot))] = getattr(theirs[path], slot)
        for slot in ("_parameters", "_buffers"):
            for name, t in getattr(m, slot).items():
                if t is not None:
                    translation[id(t)] = getattr(theirs[path], slot)[name]
    return _translated(reads, module, translation)


def _translated(reads: Reads, module: nn.Module, translation: dict[int, Any]) -> Reads | None:
    made = Reads(module, types=reads.types, counts=reads.counts, hooked=reads.hooked)
    made.kinds, made.cells, made.free = reads.kinds, reads.cells, reads.free
    made.modules = [translation.get(id(m), m) for m in reads.modules]
    called = {id(hooks): m for m in reads.modules for name in HOOKS for hooks in (getattr(m, name),)}
    made.hooks = [
        getattr(translation.get(id(called[id(h)]), called[id(h)]), HOOKS[i % len(HOOKS)])
        for i, h in enumerate(reads.hooks)
    ]
    owned: dict[int, Any] = {}
    for holder, name, value in reads.rows():
        other_holder = translation.get(id(holder), holder)
        other = other_holder.get(name, MISSING)
        if (id(holder), name) in reads.free:
            if type(other) is not int:
                return None
        elif other is not translation.get(id(value), value) and not _equal(value, other):
            return None
        if not is_scalar(value):
            owned[id(value)] = other
        made.add_row(other_holder, name, other)
    for holder, inside in reads.containers:
        other = translation.get(id(holder), owned.get(id(holder), holder))
        there = [translation.get(id(part), part) for part in inside]
        if not unchanged(contents(other), there):
            return None
        made.containers.append((other, contents(other)))
    for tensor in reads.pinned[0]:
        other = translation.get(id(tensor), tensor)
        if other is not tensor and not torch.equal(other, tensor):
            return None
        made.pin(other)
    return made if made.current() and reads.current() else None


def _equal(value: Any, other: Any) -> bool:
    """Whether two values are equal and nothing in them can differ that was not compared."""
    if type(value) is not type(other):
        return False
    if is_scalar(value):
        return bool(value == other)
    if isinstance(value, (tuple, list)) and all(map(is_scalar, value)):
        return list(map(_typed, value)) == list(map(_typed, other))
    if isinstance(value, dict) and all(map(is_scalar, value.values())):
        return [(k, *_typed(v)) for k, v in value.items()] == [
            (k, *_typed(v)) for k, v in other.items()
        ]
    return False


def _typed(value: Any) -> tuple[type, Any]:
    return type(value), value


def _tensors(modules: dict[str, nn.Module]) -> list[Any]:
    """What must be equal in parameters and buffers, with the number of the first equal one."""
    numbers: dict[int, int] = {}
    found: list[Any] = []
    for path, m in modules.items():
        for slot in (m._parameters, m._buffers):
            for name, t in slot.items():
                facts = t if t is None else (*_facts(t), numbers.setdefault(id(t), len(numbers)))
                found.append((path, name, facts))
    return found


def _facts(t: Tensor) -> tuple[Any, ...]:
    return type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad

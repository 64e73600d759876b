"""Whether another module's forward would read the same as one that was traced."""

from __future__ import annotations

import functools
import types
from dataclasses import replace
from typing import Any

from torch import nn

from .reads import (
    CELL,
    DEFAULTS,
    HOOKS,
    MISSING,
    SLOTS,
    Reads,
    contents,
    held_tensors,
    is_scalar,
    same,
    unchanged,
)


def sibling_reads(reads: Reads, module: nn.Module) -> Reads | None:
    """What ``module``'s forward reads, if it is the same as was read of another module, else None.

    It is the same if both have children of the same types at the same paths, with parameters of the
    same shapes and dtypes that are shared in the same way, and if each attribute that was read has
    the same value, or is the corresponding child, parameter or buffer. Then the trace of one is the
    trace of both, with the parameters and buffers of ``module`` at the same paths. Which parameters
    the other one has now does not matter: those of sharded models come and go with every call.

    The number of a layer may differ where a cache alone was told of it.
    """
    mine = dict(reads.module.named_modules(remove_duplicate=False))
    theirs = dict(module.named_modules(remove_duplicate=False))
    facts, tensors = held_tensors(module)
    if mine.keys() != theirs.keys() or reads.held[0] != facts:
        return None
    translation: dict[int, Any] = {id(t): other for t, other in zip(reads.held[1], tensors)}
    for t, other in zip(reads.held[1], tensors):
        if t is not None:
            translation[id(vars(t))] = vars(other)
    for path, m in mine.items():
        if type(m) is not type(theirs[path]):
            return None
        translation[id(m)] = theirs[path]
        for name in ("__dict__", *SLOTS, *HOOKS):
            translation[id(getattr(m, name))] = getattr(theirs[path], name)
    made = _translated(reads, module, translation)
    if made is None or not (made.current() and reads.current_but_parameters()):
        return None
    made.held = facts, tensors
    return made


def exchanged_reads(reads: Reads) -> Reads | None:
    """What was read, with the parameters that are there now; None if more has changed.

    What a forward computes does not depend on which parameters it finds, as long as they are of the
    same kind and as many.
    """
    made = sibling_reads(replace(reads, free=frozenset()), reads.module)
    if made is not None:
        made.free = reads.free
    return made


def _translated(reads: Reads, module: nn.Module, translation: dict[int, Any]) -> Reads | None:
    rows, containers = [], []
    looked_into = {id(holder) for holder, _ in reads.containers}
    for holder, name, value in reads.rows:
        other_holder = translation.get(id(holder), holder)
        other = other_holder.get(name, MISSING)
        if (id(holder), name) in reads.free:
            if type(other) is not int:
                return None
        elif not _match(value, other, translation, looked_into):
            return None
        rows.append((other_holder, name, other))
    # What both read, such as a variable of a function, is to be nothing of one of them.
    common = *(kind[2] for kind in reads.kinds), *reads.facts[CELL][1], *reads.facts[DEFAULTS][1]
    if not all(_match(value, value, translation, looked_into) for value in common):
        return None
    for holder, inside in reads.containers:
        other = translation.get(id(holder), holder)
        there = contents(other)
        if not unchanged(there, [translation.get(id(part), part) for part in inside]):
            return None
        containers.append((other, there))
    facts = {
        get: ([translation.get(id(x), x) for x in about], answers)
        for get, (about, answers) in reads.facts.items()
    }
    return replace(reads, module=module, rows=rows, facts=facts, containers=containers)


def _match(value: Any, other: Any, translation: dict[int, Any], looked_into: set[int]) -> bool:
    """Whether ``other`` is to the sibling what ``value`` is to the module that was traced.

    Containers that are equal are added to the translation.
    """
    if id(value) in translation:
        return other is translation[id(value)]
    if type(value) is not type(other):
        return False
    if is_scalar(value):
        return same(value, other)
    parts: list[tuple[Any, Any]]
    if isinstance(value, types.MethodType):
        parts = [(value.__func__, other.__func__), (value.__self__, other.__self__)]
    elif isinstance(value, functools.partial):
        names = "func", "args", "keywords"
        parts = [(getattr(value, name), getattr(other, name)) for name in names]
    elif isinstance(value, tuple) or id(value) in looked_into:
        mine, theirs = contents(value), contents(other)
        if len(mine) != len(theirs):
            return False
        parts = list(zip(mine, theirs))
    else:
        return other is value
    translation[id(value)] = other
    return all(_match(*part, translation, looked_into) for part in parts)

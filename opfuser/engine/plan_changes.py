"""Why the plan of the last call does not hold for another one: what differs between their keys."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from ..core import change_tracking
from ..core.op_base import BasicOperation, FusibleOperation
from ..events.kinds import Change, PlanInvalidated
from ..recipe import Recipe
from ..registry import FusionHandle
from .plan_key import CallFacts, PlanKey
from .routing import describe

_INPUT = {
    "grad_enabled": "grad mode",
    "dtype": "dtype of the input",
    "device": "device of the input",
    "requires_grad": "requires_grad of the input",
    "autocast_dtype": "autocast dtype",
}
_PARAMETERS = {
    "parameter_dtypes": "dtype",
    "parameter_shapes": "shape",
    "parameters_require_grad": "requires_grad",
}
# Fields of a signature of change_tracking, which begins with the type.
_FLAGS, _BUFFERS, _CHILDREN = 1, 2, 3

# A model that is frozen or moved as a whole has one change per parameter.
_MOST = 16


def invalidated(
    number: int,
    before: PlanKey,
    after: PlanKey,
    units: Sequence[FusibleOperation],
    ops: Sequence[BasicOperation],
) -> PlanInvalidated:
    """The event that a fuser's last plan does not hold for a call.

    Args:
        number: of the plan.
        before, after: its key, and that of the call.
        units: the operations that a plan starts from.
        ops: the basic operations.
    """
    known = {id(op): describe(n, op) for n, op in enumerate(ops)}
    modules = {id(op): op for op in [*units, *ops]}.values()
    operations = [known.get(id(op), type(op).__name__) for op in modules]
    parameters = [f"{name} of {known[id(op)]}" for op in ops for _, name in op.parameter_slots()]
    kinds = tuple(type(op).__name__ for op in ops)
    return PlanInvalidated(number, kinds, changes(before, after, operations, parameters))


def changes(
    before: PlanKey, after: PlanKey, operations: Sequence[str], parameters: Sequence[str]
) -> tuple[Change, ...]:
    """What differs between two keys of one fuser; changes that are alike of many are one.

    Args:
        before, after: the keys.
        operations: names of those whose signatures the keys hold.
        parameters: names of the parameters, in their order.
    """
    found = [
        *_of_call(before.call, after.call, parameters),
        *_of_operations(before.operations, after.operations, operations),
        *_of_fusions(before.fusions, after.fusions),
    ]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (what, owner), old, new in found:
        alike.setdefault((what, old, new), []).append(owner)
    out = [
        Change(f"{what} of {_listed(owners)}" if owners[0] else what, old, new)
        for (what, old, new), owners in alike.items()
    ]
    if len(out) > _MOST:
        out[_MOST:] = [Change("more", "", f"{len(out) - _MOST} other changes")]
    return tuple(out)


_Found = Iterator[tuple[tuple[str, str], str, str]]


def _of_call(before: CallFacts, after: CallFacts, parameters: Sequence[str]) -> _Found:
    for field, what in _INPUT.items():
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            yield (what, ""), _text(old), _text(new)
    yield from _of_recipes(before.recipe, after.recipe)
    for n, pair in enumerate(zip(before.extra_inputs, after.extra_inputs)):
        for what, old, new in zip(("dtype", "requires_grad"), *pair):
            if old != new:
                yield (what, f"extra input {n}"), _text(old), _text(new)
    for field, what in _PARAMETERS.items():
        # Without grad mode it is unknown which parameters require grad: that is the mode's change.
        values = getattr(before, field) or (), getattr(after, field) or ()
        for name, old, new in zip(parameters, *values):
            if old != new:
                yield (what, name), _text(old), _text(new)


def _of_recipes(before: Recipe | None, after: Recipe | None) -> _Found:
    if type(before) is not type(after):
        old, new = (type(r).__name__ if r else "none" for r in (before, after))
        yield ("recipe", ""), old, new
    elif before != after and before is not None:
        for field in fields(before):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if old != new:
                yield (f"{type(before).__name__}.{field.name}", ""), _text(old), _text(new)


def _of_operations(
    before: Sequence[Hashable], after: Sequence[Hashable], operations: Sequence[str]
) -> _Found:
    for name, old, new in zip(operations, before, after):
        if old != new:
            yield from _of_operation(name, old, new)


def _of_operation(name: str, before: Any, after: Any) -> _Found:
    if before[0] is not after[0]:
        yield ("type", name), _text(before[0]), _text(after[0])
    for at, kind in ((_FLAGS, ""), (_BUFFERS, "buffer "), (_CHILDREN, "submodule ")):
        old, new = _by_name(before[at]), _by_name(after[at])
        for what in {**old, **new}:
            values = old.get(what, _ABSENT), new.get(what, _ABSENT)
            if values[0] != values[1]:
                yield (kind + what, name), *_told_apart(*map(_text, values))


_ABSENT = "absent"


def _by_name(rows: Iterable[Any]) -> dict[str, Any]:
    return {name: value[0] if len(value) == 1 else value for name, *value in rows}


def _told_apart(before: str, after: str) -> tuple[str, str]:
    """Texts of values that differ."""
    return before, after if after != before else "another one"


def _of_fusions(before: Any, after: Any) -> _Found:
    """What differs between two states of the registry, and between places in configurations."""
    if before == after:
        return
    if before[1:] != after[1:]:
        yield ("configuration of fusions", ""), "as it was", "another one"
    if before[0] == after[0]:
        return
    old, new = _switches(before[0]), _switches(after[0])
    for name in {**old, **new}:
        values = old.get(name, "not registered"), new.get(name, "not registered")
        if values[0] != values[1]:
            yield (f"fusion {name}", ""), values[0], values[1]
    if old == new:
        yield ("fusions", ""), "as they were", "in another order, or other ones of the same names"


def _switches(pairs: Iterable[tuple[FusionHandle, str]]) -> dict[str, str]:
    """Whether each fusion is on, and else what switched it off."""
    return {handle.name: f"off ({off})" if off else "on" for handle, off in pairs}


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} and {len(names) - 1} more"


def _text(value: Any) -> str:
    """A value of a key in at most 60 characters, without what differs between processes."""
    if isinstance(value, type):
        return value.__name__
    if type(value).__module__ == change_tracking.__name__:
        return "an object"
    is_row = type(value) in (tuple, list)
    text = f"({', '.join(map(_text, value))})" if is_row else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""What a traced forward was seen to read, with what it takes to undo what it writes."""

from __future__ import annotations

import enum
import functools
import io
import logging
import random
import re
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ..torch_internals import GLOBAL_HOOKS
from .reads import (
    CELL,
    CODE,
    COUNT,
    DEFAULTS,
    DTYPE,
    HOOKS,
    KEYWORD_DEFAULTS,
    MISSING,
    REQUIRES_GRAD,
    SHAPE,
    SLOTS,
    Reads,
    Row,
    contents,
    held_tensors,
    is_of_python,
    is_scalar,
    ordered_by,
    unchanged,
)

# The effect of a call of a memoized function with other arguments than before.
FILLS_A_CACHE = "fills a cache"

# Objects that are compared by identity: nothing inside them is read that is not noted elsewhere.
_OPAQUE = (
    Tensor,
    nn.Module,
    type,
    range,
    enum.Enum,
    logging.Logger,
    re.Pattern,
    types.ModuleType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_CONTAINERS = dict, list, set
_DEEPEST = 6
_ASKING = frozenset(("AttributeError", "__dict__", "attrgetter", "getattr", "hasattr", "vars"))


class Observed:
    """Collects what a forward reads.

    Args:
        root: the module that is traced.
        opaque: types of objects whose contents are noted as they are read.
        note_effect: is told what cannot be followed, as a predicate.
        keep: is told what cannot be put back either, before the forward may change it.
    """

    def __init__(
        self,
        root: nn.Module,
        opaque: tuple[type, ...],
        note_effect: Callable[[str], None],
        keep: Callable[[str], object],
    ) -> None:
        self.root, self.note_effect, self.keep = root, note_effect, keep
        self.modules: dict[int, nn.Module] = {id(root): root}
        self.called: dict[int, nn.Module] = {}
        self.tensors: set[int] = set()
        self.executed: set[int] = set()  # code that is neither torch's nor Python's
        self.names: set[str] = set()  # that it has for globals and attributes
        self.texts: set[str] = set()  # that may be names, and are not among these
        self.free: set[tuple[int, str]] = set()  # rows in which siblings may differ
        self._opaque = (*_OPAQUE, *opaque)
        self._rows: dict[tuple[int, str], Row] = {}
        self._kinds: dict[tuple[type, str], Any] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._held: dict[int, tuple[Any, Any]] = {}  # containers, and their copies
        self._containers: set[int] = set()  # those of them whose contents were read
        self._caches: dict[int, tuple[Any, int]] = {}
        self.cached: dict[int, int] = {}  # caches, by the code of what they keep results of
        self.kept_results: set[int] = set()  # caches that were given more than scalars
        self._variables: dict[int, tuple[types.CellType, Any]] = {}  # as they were before
        self._classes: dict[type, dict[str, Any]] = {}  # likewise
        self._found: dict[int, list[types.FunctionType]] = {}  # by their code
        self._done: set[int] = set()  # those of them whose variables are noted
        self._imported: dict[int, types.ModuleType] = {}  # in variables and by imports of functions
        self.named: dict[int, types.ModuleType] = {}  # that are globals of executed code
        for module in root.modules():
            for attributes in attributes_of(module):
                self.hold(attributes)
            self._hold_class(type(module))
        self._tensors = [vars(t) for t in (*root.parameters(), *root.buffers())]
        for attributes in self._tensors:
            self.hold(attributes)

    def row(self, holder: dict[str, Any], name: str, value: Any) -> None:
        """Notes that an entry of a dict was read, unless the forward itself has set it."""
        if isinstance(value, Tensor):
            self.tensors.add(id(value))
        held = self._held.get(id(holder))
        if held is not None and value is not held[1].get(name, MISSING):
            return  # neither a later call nor :meth:`undo` may find this value there
        self._rows.setdefault((id(holder), name), (holder, name, value))

    def kind(self, kind: type, name: str) -> None:
        """Notes that an attribute of a type was read; of methods, what ``super()`` may find."""
        bases = [b for b in kind.__mro__[1:] if isinstance(vars(b).get(name), types.FunctionType)]
        for base in (kind, *(b for b in bases if not is_of_python(b.__module__))):
            if (base, name) not in self._kinds:
                value = getattr(base, name, MISSING)
                self._kinds[base, name] = value
                self.look_into(name, value.fget if isinstance(value, property) else value)

    def attribute(self, holder: Any, own: dict[str, Any], name: str, value: Any) -> None:
        """Notes that an attribute was read, in the holder's ``own`` dict or on its type."""
        if name in own:
            self.row(own, name, value)
            self.look_into(name, value)
        else:
            self.row(own, name, MISSING)
            self.kind(type(holder), name)

    def look_into(self, name: str, value: Any, depth: int = 0) -> None:
        """Notes the contents of what may change inside."""
        if isinstance(value, Tensor):
            self.tensors.add(id(value))
        if isinstance(value, type):
            self._hold_class(value)
        if isinstance(value, types.ModuleType) and not is_of_python(value.__name__):
            self._imported.setdefault(id(value), value)
        if type(value) is str and value.isidentifier():  # with which an attribute may be found
            self.texts.add(value)
        if value is MISSING or is_scalar(value) or isinstance(value, self._opaque):
            return
        if type(value).__module__.partition(".")[0] == "torch":
            return
        if depth > _DEEPEST:
            self.keep(f"reads '{name}', a nested {type(value).__name__}")
            return
        for part in self._parts(name, value):
            self.look_into(name, part, depth + 1)

    def _parts(self, name: str, value: Any) -> list[Any]:
        """What there is to look into inside a value, whose own contents are noted."""
        if isinstance(value, types.FunctionType):
            self._functions[id(value)] = value
            self.hold(vars(value))
            self._hold_inside(value)
            return []
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, types.BuiltinFunctionType):  # such as the append of a list
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, functools._lru_cache_wrapper):
            self._caches.setdefault(id(value), (value, value.cache_info().misses))
            if isinstance(value.__wrapped__, types.FunctionType):
                self.cached[id(value.__wrapped__.__code__)] = id(value)
            else:
                self.kept_results.add(id(value))
            return [value.__wrapped__]
        if isinstance(value, (tuple, frozenset)):
            return contents(value)
        if isinstance(value, (list, dict, set)):
            own = getattr(value, "__dict__", value)  # of a subclass
            return [*self.container(value), *self.container(own)]
        if hasattr(value, "__dict__") and _has_attributes_alone(type(value)):
            self._hold_class(type(value))
            return self.container(value)
        self.keep(f"reads '{name}', a {type(value).__name__}")
        return []

    def _executed_functions(self) -> list[types.FunctionType]:
        """The functions that were found and executed, whose attributes are noted."""
        done: dict[int, types.FunctionType] = {}
        while new := [
            function
            for number, function in self._functions.items()
            if number not in done and id(function.__code__) in self.executed
        ]:
            for function in new:
                done[id(function)] = function
                for attribute, part in vars(function).items():
                    if not attribute.startswith("__"):
                        self.row(vars(function), attribute, part)
                        self.look_into(attribute, part)
        return list(done.values())

    def _named_by_code(self) -> None:
        """Notes attributes that executed code names, and whose reading is not seen."""
        noted = {(_owner(kind, name), name) for kind, name in self._kinds}
        asked = set() if self.names.isdisjoint(_ASKING) else self.texts
        for kind in self._classes:
            for name, value in list(vars(kind).items()):
                function = value.fget if isinstance(value, property) else value
                function = getattr(function, "__func__", function)
                if isinstance(function, types.FunctionType):
                    read = id(function.__code__) in self.executed
                else:
                    read = (name in self.names or name in asked) and not hasattr(value, "__get__")
                if read and (kind, name) not in noted:
                    self.kind(kind, name)
        for holder in (*self._tensors, *map(vars, self._functions.values())):
            self._named_in(holder, self.names | self.texts)
        for module in self.named.values():
            self._named_in(vars(module), asked)
        done: set[int] = set()
        while new := [m for number, m in self._imported.items() if number not in done]:
            done.update(map(id, new))
            for module in new:
                self._named_in(vars(module), self.names | self.texts)

    def _named_in(self, attributes: dict[str, Any], names: set[str]) -> None:
        for name in attributes.keys() & names:
            self.row(attributes, name, attributes[name])
            self.look_into(name, attributes[name])

    def container(self, holder: Any) -> list[Any]:
        """Notes the contents of a container, and returns them where that had not been done."""
        if id(holder) in self._containers:
            return []
        self.hold(holder)
        self._containers.add(id(holder))
        return contents(holder)

    def hold(self, holder: Any) -> None:
        """Notes the contents of a container, which it has again when the trace has ended."""
        if id(holder) not in self._held:
            self._held[id(holder)] = holder, _copy_of(holder)

    def execute(self, code: types.CodeType) -> None:
        """Notes that code is about to be executed, with what may change in its functions."""
        self.executed.add(id(code))
        for function in self._found.get(id(code), ()):
            self._hold_function(function)

    def _hold_function(self, function: types.FunctionType) -> None:
        if id(function) in self._done:
            return
        self._done.add(id(function))
        self.hold(vars(function))
        name = function.__name__
        self.look_into(name, (function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not yet bound
                self._variables.setdefault(id(cell), (cell, cell.cell_contents))
                self.look_into(name, cell.cell_contents)

    def _hold_inside(self, value: Any) -> None:
        """Notes the contents of containers at any depth, and functions for when they are executed.

        Values of subclasses may compute what is inside of them.
        """
        if isinstance(value, types.FunctionType):
            self._found.setdefault(id(value.__code__), []).append(value)
            if id(value.__code__) in self.executed:
                self._hold_function(value)
        elif type(value) is tuple or (type(value) in _CONTAINERS and id(value) not in self._held):
            if type(value) is not tuple:
                self.hold(value)
            for part in contents(value):
                self._hold_inside(part)

    def _hold_class(self, kind: type) -> None:
        """Notes the attributes of a class and of those that it inherits from, likewise."""
        for c in kind.__mro__:
            if c not in self._classes and not is_of_python(c.__module__):
                self._classes[c] = dict(vars(c))
                for value in self._classes[c].values():
                    self._hold_inside(value)

    def undo(self) -> None:
        """Puts back what was written since, and notes that it was."""
        for holder, copy in self._held.values():
            if not unchanged(contents(holder), contents(copy)):
                self.note_effect(f"writes to {_described(holder)}")
                _refill(holder, copy)
        for holder, name, value in self._rows.values():
            if holder.get(name, MISSING) is not value:
                self.note_effect(f"writes to '{name}'")
                if value is MISSING:
                    del holder[name]
                else:
                    holder[name] = value
        for kind, before in self._classes.items():
            self._undo_in_class(kind, before)
        for cell, value in self._variables.values():
            if cell.cell_contents is not value:
                self.note_effect("writes to a variable of another function")
                cell.cell_contents = value
        for cache, misses in self._caches.values():
            filled = cache.cache_info().misses != misses
            if filled and id(cache) in self.kept_results:  # it may hold stand-ins now
                self.note_effect(FILLS_A_CACHE)
                cache.cache_clear()

    def _undo_in_class(self, kind: type, before: dict[str, Any]) -> None:
        now = dict(vars(kind))
        for name in now.keys() | before.keys():
            if now.get(name, MISSING) is before.get(name, MISSING):
                continue
            self.note_effect(f"writes to '{name}' of a class")
            if name in before:
                setattr(kind, name, before[name])
            else:
                delattr(kind, name)

    def reads(self) -> Reads:
        """What was read, after the trace."""
        self.keep = self.note_effect  # nothing is changed any more
        children = (v for _, _, v in self._rows.values() if isinstance(v, nn.Module))
        self.modules.update((id(child), child) for child in children)
        for module in self.called.values():
            self.modules[id(module)] = module
            forward = module.__dict__.get("forward", MISSING)
            self.row(module.__dict__, "forward", forward)
            self.look_into("forward", forward)
        modules = list(self.modules.values())
        holders = {holder for holder, _ in self._rows}
        for module in modules:
            self.kind(type(module), "forward")
            if type(module).__call__ is not nn.Module.__call__:
                self.kind(type(module), "__call__")
            own, *slots = attributes_of(module)
            for name, slot in zip(SLOTS, slots):
                if id(slot) in holders:
                    self.row(own, name, slot)
        self._named_by_code()
        functions = self._executed_functions()
        hooks = [m.__dict__[name] for m in self.called.values() for name in HOOKS]
        tensors = [v for _, _, v in self._rows.values() if isinstance(v, Tensor)]
        parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
        held = [c for n, (c, _) in self._held.items() if n in self._containers]
        objects = [c for c in held if not isinstance(c, _CONTAINERS)]
        asked: dict[Callable[[Any], Any], list[Any]] = {
            SHAPE: tensors,
            DTYPE: tensors,
            # Of the others, a forward may compute some without gradients.
            REQUIRES_GRAD: [p for p in parameters if not p.requires_grad],
            type: [*modules, *objects],
            len: [*map(vars, dict.fromkeys(map(type, modules))), vars(Tensor)],
            COUNT: [*GLOBAL_HOOKS, *hooks],
            CODE: functions,
            DEFAULTS: [f for f in functions if f.__defaults__],
            KEYWORD_DEFAULTS: [f for f in functions if f.__kwdefaults__],
        }
        if not self.names.isdisjoint(_ASKING):  # for what parameters may not have yet
            asked[frozenset(self.names | self.texts).isdisjoint] = [*map(vars, parameters)]
        facts = {get: (about, [*map(get, about)]) for get, about in asked.items()}
        facts[CELL] = (
            [cell for cell, _ in self._variables.values()],
            [v for _, v in self._variables.values()],
        )
        return Reads(
            self.root,
            list(self._rows.values()),
            [(kind, name, value) for (kind, name), value in self._kinds.items()],
            facts,
            [(c, contents(copy)) for n, (c, copy) in self._held.items() if n in self._containers],
            held_tensors(self.root),
            frozenset(self.free),
        )


class _Plain:
    """Has attributes alone."""


_OTHERS_WITH_ATTRIBUTES_ALONE = types.SimpleNamespace, threading.local, staticmethod, classmethod
# What these do is noted when they are called.
_NOTED_WHEN_CALLED = random.Random, io.IOBase


def _has_attributes_alone(kind: type) -> bool:
    """Whether all that objects of a type hold is what ``vars`` returns: no slots, no part in C."""
    if issubclass(kind, _NOTED_WHEN_CALLED):
        return True
    for c in kind.__mro__:
        members = (n for n, d in vars(c).items() if isinstance(d, types.MemberDescriptorType))
        if not all(name.startswith("__") for name in members):
            return False
        known = c in _OTHERS_WITH_ATTRIBUTES_ALONE or not is_of_python(c.__module__)
        if not known and c.__basicsize__ > _Plain.__basicsize__:
            return False
    return True


def _copy_of(holder: Any) -> Any:
    """What a container holds, or an object's attributes; its class may make what it returns."""
    if isinstance(holder, dict):
        return dict(ordered_by(holder).items(holder))
    return holder.copy() if isinstance(holder, (list, set)) else dict(vars(holder))


def attributes_of(module: nn.Module) -> list[dict[str, Any]]:
    """The dicts that hold a module's attributes."""
    own = object.__getattribute__(module, "__dict__")
    names = "_parameters", "_buffers", "_modules"  # which it has from nn.Module.__init__ on
    return [own, *(own[name] for name in names if name in own)]


def _owner(kind: type, name: str) -> type | None:
    """The class in which an attribute of a class is found."""
    return next((c for c in kind.__mro__ if name in vars(c)), None)


def _described(holder: Any) -> str:
    return "attributes" if isinstance(holder, dict) else f"a {type(holder).__name__}"


def _refill(holder: Any, copy: Any) -> None:
    if isinstance(holder, list):
        holder[:] = copy
        return
    held = holder if isinstance(holder, (dict, set)) else vars(holder)
    held.clear()
    held.update(copy)

"""Detection of changes to modules, at no cost to calls of unchanged ones."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_internals as internals
from ..runtime import is_own


class Clock:
    """Counts every change of any operation, so that unchanged ones need no inspection.

    Attributes:
        now: changes so far.
        states: numbers and flags that were changed during a forward pass, see :class:`Tracked`.
    """

    now = 0
    states = 0


class _ActiveCalls(threading.local):
    """Forward passes under way on this thread; what another thread sets meanwhile is no state."""

    depth = 0


active_calls = _ActiveCalls()


_serials = itertools.count()


class Note:
    """What a call leaves in an attribute of an operation for later ones; no plan depends on it."""


class Stamp:
    """The description of a module since its last change, which guards code that was traced for it.

    torch.compile compares constants like this one by ``==`` before it calls traced code. Only then,
    or when the module is traced, is the module described: what is never compiled pays nothing, and
    modules that are alike share traced code though none but the first one was traced.
    """

    def __init__(self, module: Tracked) -> None:
        self._module = weakref.ref(module)  # which holds this
        self._text: str | None = None

    def text(self) -> str:
        """What the module was when this was first asked; a change gives it another stamp."""
        if self._text is None:
            module = self._module()
            assert module is not None
            self._text = module._describe()
        return self._text

    def guard(self) -> None:
        """Makes code that is being traced depend on the stamp."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stamp) and self.text() == other.text()

    def __hash__(self) -> int:
        return hash(self.text())


internals.register_constant(Stamp)


def _that_counts(name: str) -> Callable[..., Any]:
    """The method of that name, which registers a hook of a :class:`Tracked` module, as a change."""

    @functools.wraps(getattr(nn.Module, name))
    def registered(self: Tracked, *args: Any, **kwargs: Any) -> Any:
        handle = getattr(super(Tracked, self), name)(*args, **kwargs)
        self._touch()  # once it is there: descriptions tell of hooks
        return handle

    return registered


class Tracked(nn.Module):
    """A module that records when its structure changes.

    Setting or deleting an attribute, moving, casting, switching the training flag and registering
    a hook all count. A parameter in the place of another one does not, whether it is set or written
    straight into ``_parameters`` (as ``functional_call`` does): parameters are read, and their
    dtypes and shapes compared, at every call. Nor does a number or flag changed during a forward
    pass, such as a counter of calls: no plan depends on it until it is set outside of one.
    """

    _stamp: Stamp  # since the last change
    _serial: str  # tells it from all others, once it was traced

    def _describe(self) -> str:
        """A description of everything that a call may depend on, except parameters."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in DERIVED}

    def _touch(self) -> None:
        Clock.now += 1
        self.__dict__["_stamp"] = Stamp(self)

    def _refresh_stamp(self) -> None:
        """Replaces the stamp if something has changed that is not noticed, as a hook that left."""
        now, own = Stamp(self), self.__dict__
        if now != own.get("_stamp"):
            own["_stamp"] = now
        own.setdefault("_serial", f"module {next(_serials)}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._touch()

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in own and isinstance(value, _VALUES):
            old = own[name]
            if type(old) is type(value) and old == value and repr(old) == repr(value):  # 0.0, -0.0
                return
            if active_calls.depth and name != "training":
                own.setdefault("_state_names", set()).add(name)
                super().__setattr__(name, value)  # type: ignore[arg-type]
                own.pop("_settings", None)
                Clock.states += 1
                return
        if isinstance(value, Tensor) and (old := _parameter(self, name)) is not None:
            super().__setattr__(name, value)
            own.pop("_settings", None)
            if _may_be_swapped(self, old, value):
                own["__setattr__"] = _StraightIntoParameters(self)
            return
        super().__setattr__(name, value)
        own.pop("_settings", None)
        if "_state_names" in own:
            own["_state_names"].discard(name)
        self._touch()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop("_settings", None)
        self._touch()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._touch()
        return out

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        replaces = param is not None and _parameter(self, name) is not None
        super().register_parameter(name, param)
        if not replaces:
            self._touch()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        self._touch()

    register_forward_pre_hook = _that_counts("register_forward_pre_hook")
    register_forward_hook = _that_counts("register_forward_hook")
    register_full_backward_pre_hook = _that_counts("register_full_backward_pre_hook")
    register_full_backward_hook = _that_counts("register_full_backward_hook")
    register_backward_hook = _that_counts("register_backward_hook")


# What is made anew for a copy of a module.
DERIVED = ("_stamp", "_serial", "__setattr__", "_compiled_call_impl")


class _StraightIntoParameters:
    """``module.__setattr__``, as FSDP2 reads it of a module whose parameters it swaps.

    FSDP2 swaps each of them four times a step, and writes straight into ``_parameters`` where the
    ``__func__`` of this is that of ``nn.Module``. That is right here, see :class:`Tracked`, and
    takes 0.5 us in place of 5. Calling it sets an attribute as the class of the module does.
    """

    __func__ = staticmethod(nn.Module.__setattr__)

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # which holds this

    def __call__(self, name: str, value: Any) -> None:
        module = self._module()
        assert module is not None
        setattr(module, name, value)


_SEES_PARAMETERS = ("__setattr__", "register_parameter", "make_settings")


def _may_be_swapped(module: nn.Module, old: Tensor, new: Tensor) -> bool:
    """Whether a wrapper, which begins to swap parameters, may write them into ``_parameters``.

    Not where a class of the user's is to see them; nor codes of a weight, of one byte each, which
    are registered together with their scale. A wrapper shows by a tensor of a subclass.
    """
    return (
        type(new) is not nn.Parameter
        and old.itemsize > 1
        and new.itemsize > 1
        and all(
            is_own(cls.__module__)
            or cls.__module__.startswith(("torch.", "builtins"))
            or vars(cls).keys().isdisjoint(_SEES_PARAMETERS)
            for cls in type(module).__mro__
        )
    )


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """The parameter that reading ``name`` gives, if it is one."""
    own = module.__dict__
    return None if name in own else own.get("_parameters", {}).get(name)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` would run a hook of its own."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether the module is compiled by itself, by its ``compile()``."""
    return getattr(module, "_compiled_call_impl", None) is not None


def replaces_forward(module: nn.Module) -> bool:
    """Whether an attribute of ``module`` stands in place of the forward of its class.

    Libraries that wrap it so may leave the forward of the class there once they take the wrapper
    away, as accelerate does. That is none.
    """
    own = module.__dict__.get("forward")
    if own is None:
        return False
    put_back = getattr(own, "__func__", None) is type(module).forward
    return not (put_back and own.__self__ is module)


# Attributes of a module on which no plan depends.
_NOT_IN_SIGNATURE = frozenset(
    "_parameters _buffers _non_persistent_buffers_set _backward_pre_hooks _backward_hooks "
    "_is_full_backward_hook _forward_hooks _forward_hooks_with_kwargs "
    "_forward_hooks_always_called _forward_pre_hooks _forward_pre_hooks_with_kwargs "
    "_state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks "
    "_load_state_dict_post_hooks _modules basic_ops _owner _alone _routing_captured "
    "_stamp _serial _state_names _settings __setattr__".split()
)


class _Same:
    """An object that cannot be compared by value: equal only to itself.

    Holds no reference to it: signatures outlive what operations hold for a moment.
    """

    __slots__ = ("number", "value")

    def __init__(self, value: Any) -> None:
        self.number = id(value)
        try:
            self.value: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # of a builtin type; its id has to do
            self.value = lambda: self.number

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or other.number != self.number:
            return False
        mine = self.value()
        return (mine is not None and mine is other.value()) or type(mine) is int

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"<{self.number}>"


_VALUES = (int, float, str, bytes, type(None), torch.dtype, torch.device, type)


def _freeze(value: Any) -> Hashable:
    if isinstance(value, (bool, float)):
        return repr(value)  # 1 == 1.0 == True, and 0.0 == -0.0
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_freeze, value))
    if isinstance(value, dict):
        return tuple((_freeze(key), _freeze(item)) for key, item in value.items())
    if isinstance(value, Tensor):
        return (value.dtype, value.shape, value.device)
    if isinstance(value, Note):
        kind: type = type(value)
        return kind
    if getattr(getattr(value, "__dataclass_params__", None), "frozen", False):
        return (type(value), *[_freeze(getattr(value, field.name)) for field in fields(value)])
    return _Same(value)


def signature(module: nn.Module) -> Hashable:
    """What a fusion may read of a module besides its parameters: type, flags, buffers."""
    state = module.__dict__.get("_state_names", ())
    flags = tuple(
        (name, _freeze(value))
        for name, value in module.__dict__.items()
        if name not in _NOT_IN_SIGNATURE and name not in state
    )
    buffers = tuple((name, b.dtype, b.shape, b.device) for name, b in module.named_buffers())
    children = tuple((name, type(inner)) for name, inner in module.named_modules())
    return (type(module), flags, buffers, children)

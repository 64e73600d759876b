"""Reading modules, and noticing when they are no longer what was read."""

from __future__ import annotations

from itertools import repeat
from operator import is_, is_not
from typing import Any, TypeAlias

from torch import nn

__all__ = [
    "Reader",
    "Refused",
    "ReplacedForward",
    "foreign_forward",
    "foreign_hooks",
    "is_capturing",
    "replaced_forward",
]

_MISSING = object()
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
# Where transformers has the hooks that collect attentions and hidden states, once they were asked
# for; they stay on the modules.
_CAPTURING = "transformers.utils.output_capturing"


_Columns: TypeAlias = tuple[list[Any], list[Any]]


class Refused(Exception):  # noqa: N818 - an answer, not a mistake
    """Raised with the reason why a module is not replaced."""


class ReplacedForward:
    """Abstract. What stands in a module as its own ``forward`` where it was replaced.

    Attributes:
        reverted: whether the class's forward takes all calls again.
    """

    reverted: bool = False


def replaced_forward(value: Any) -> ReplacedForward | None:
    """The replaced forward that ``value`` is, or is a method of, as wrappers leave it behind."""
    value = getattr(value, "__func__", value)
    return value if isinstance(value, ReplacedForward) else None


class Reader:
    """Reads modules, and remembers what it has read.

    All that a sequence is built from is read here, so that :meth:`is_current` tells in a few
    microseconds whether one that was built before is still right.
    """

    def __init__(self) -> None:
        self.captures = False
        # Columns, of which each row is one thing that was read: functions of C go over them at
        # every call, in a third of the time of loops in Python.
        self._children: _Columns = [], []
        self._types: _Columns = [], []
        self._hooks: _Columns = [], []
        self._values: tuple[list[dict[str, Any]], list[str], list[Any]] = [], [], []
        self._present: tuple[list[dict[str, Any]], list[str], list[bool]] = [], [], []

    @classmethod
    def of_all(cls, root: nn.Module) -> Reader:
        """One that has read all there is in a module, of which it is not known what matters."""
        read = cls()
        for module in root.modules():
            read.children(module)
            if module is not root:
                read.inner(module)
            for name, value in list(module.__dict__.items()):
                if isinstance(value, (bool, int, float, str)) and name != "training":
                    read.value(module, name)
        return read

    def children(self, module: nn.Module) -> dict[str, nn.Module]:
        """Those of a module, by name."""
        _note(self._children, module._modules, dict(module._modules))
        return {name: child for name, child in module._modules.items() if child is not None}

    def inner(self, module: nn.Module) -> None:
        """Remembers the type, the hooks, the forward and the parameters of a module inside."""
        _note(self._types, module, type(module))
        _note(self._values, module.__dict__, "forward", module.__dict__.get("forward", _MISSING))
        for name in _HOOKS:
            hooks = getattr(module, name)
            _note(self._hooks, hooks, len(hooks))
            self.captures = self.captures or any(map(is_capturing, hooks.values()))
        for name in dict.fromkeys(("weight", "bias", *module._parameters)):
            there = module._parameters.get(name) is not None
            _note(self._present, module._parameters, name, there)

    def value(self, module: Any, name: str, default: Any = None) -> Any:
        """An attribute."""
        own = module.__dict__
        _note(self._values, own, name, own.get(name, _MISSING))
        return getattr(module, name, default)

    def include(self, other: Reader) -> None:
        """Remembers what another one has read, too."""
        for own, added in zip(self._columns(), other._columns()):
            for column, more in zip(own, added):
                column.extend(more)
        self.captures = self.captures or other.captures

    def _columns(self) -> tuple[tuple[list[Any], ...], ...]:
        return self._children, self._types, self._hooks, self._values, self._present

    def is_current(self) -> bool:
        """Whether all is as it was read."""
        children, before = self._children
        modules, types = self._types
        hooks, counts = self._hooks
        owners, names, values = self._values
        holders, parameters, present = self._present
        return (
            list(map(len, hooks)) == counts
            and all(map(is_, map(dict.get, owners, names, repeat(_MISSING)), values))
            and children == before
            and list(map(type, modules)) == types
            and list(map(is_not, map(dict.get, holders, parameters), repeat(None))) == present
        )


def _note(columns: tuple[list[Any], ...], *row: Any) -> None:
    for column, value in zip(columns, row):
        column.append(value)


def is_capturing(hook: Any) -> bool:
    """Whether it is a hook of transformers that collects outputs if a call asks for them."""
    return getattr(hook, "__module__", None) == _CAPTURING


def foreign_hooks(module: nn.Module) -> bool:
    """Whether a module carries hooks other than those."""
    return any(not is_capturing(h) for name in _HOOKS for h in getattr(module, name).values())


def foreign_forward(module: nn.Module) -> bool:
    """Whether something other than this package has set the module's own forward."""
    own = module.__dict__.get("forward")
    return own is not None and replaced_forward(own) is None

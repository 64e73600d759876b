"""Reading modules, and noticing when they are no longer what was read."""

from __future__ import annotations

from typing import Any

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
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._types: list[tuple[nn.Module, type[nn.Module]]] = []
        self._present: list[tuple[dict[str, Any], str, bool]] = []
        self._hooks: list[dict[int, Any]] = []
        self._counts: list[int] = []
        self.captures = False

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
        self._dicts.append((module._modules, dict(module._modules)))
        return {name: child for name, child in module._modules.items() if child is not None}

    def inner(self, module: nn.Module) -> None:
        """Remembers the type, the hooks, the forward and the parameters of a module inside."""
        self._types.append((module, type(module)))
        forward = module.__dict__.get("forward", _MISSING)
        self._values.append((module.__dict__, "forward", forward))
        for name in _HOOKS:
            hooks = getattr(module, name)
            self._hooks.append(hooks)
            self._counts.append(len(hooks))
            self.captures = self.captures or any(map(is_capturing, hooks.values()))
        for name in ("weight", "bias"):
            there = module._parameters.get(name) is not None
            self._present.append((module._parameters, name, there))

    def value(self, module: Any, name: str, default: Any = None) -> Any:
        """An attribute."""
        own = module.__dict__
        self._values.append((own, name, own.get(name, _MISSING)))
        return getattr(module, name, default)

    def include(self, other: Reader) -> None:
        """Remembers what another one has read, too."""
        self._dicts += other._dicts
        self._values += other._values
        self._types += other._types
        self._present += other._present
        self._hooks += other._hooks
        self._counts += other._counts
        self.captures = self.captures or other.captures

    def is_current(self) -> bool:
        """Whether all is as it was read."""
        return (
            [len(hooks) for hooks in self._hooks] == self._counts
            and all(d.get(name, _MISSING) is value for d, name, value in self._values)
            and all(d == before for d, before in self._dicts)
            and all(type(module) is kind for module, kind in self._types)
            and all((d.get(name) is not None) is there for d, name, there in self._present)
        )


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

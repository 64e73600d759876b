"""What torch.compile reads of the sequences and operations that it traces.

Dynamo guards each attribute that it reads. Code that reads what a call or a trace has left in a
module fits no module but this one, and would be traced anew for each layer of a model. So traced
code reads only what is there from the construction on, stamps and parameters, of modules that it
finds along paths from the one that is called; all else it is told as constants, which hold as long
as the stamps do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from .change_tracking import Tracked

__all__ = ["Functions", "Path", "TracedCalls", "TracedParameter", "at", "parameter_of", "paths"]

Path: TypeAlias = tuple[tuple[str, str | int], ...]
"""Names of attributes, each with the key or index of a module in it."""


class Functions:
    """What traced code looks up by name, as attributes.

    Of a dictionary the tracer would keep the state in which it saw it first, so that a sequence
    called twice in one graph would miss what the second call has added.
    """


class TracedParameter(NamedTuple):
    """Where a parameter stands.

    Attributes:
        path: of its module.
        name: in that module.
        computed: whether reading it computes it, as a parametrisation does.
    """

    path: Path
    name: str
    computed: bool


def at(root: Any, path: Path) -> Any:
    """The module at the end of a path."""
    for attribute, key in path:
        root = getattr(root, attribute)[key]
    return root


def parameter_of(root: Any, place: tuple[Path, str, bool]) -> Tensor:
    """The value of a :class:`TracedParameter`, of which a trace has a plain tuple."""
    path, name, computed = place
    module = at(root, path)
    value: Tensor = getattr(module, name) if computed else module._parameters[name]
    return value


def paths(root: Any) -> dict[int, tuple[Path, nn.Module]]:
    """All modules in ``root``, each with a path to it, by id."""
    found: dict[int, tuple[Path, nn.Module]] = {}
    left: list[tuple[Path, Any]] = [((), root)]
    for path, module in left:  # which grows
        if id(module) not in found:
            found[id(module)] = path, module
            left += [((*path, step), inner) for step, inner in _inside(module)]
    return found


def _inside(module: Any) -> Iterator[tuple[tuple[str, str | int], nn.Module]]:
    own = module.__dict__
    for name, child in own.get("_modules", {}).items():
        if child is not None:
            yield ("_modules", name), child
    for attribute in ("basic_ops", "_given_ops"):  # of a compound, of a fuser
        for number, op in enumerate(own.get(attribute, ())):
            yield (attribute, number), op


class TracedCalls:
    """What torch.compile may trace a call of: a sequence, an operation, or a fuser."""

    def _prepare_tracing(self) -> None:
        """Makes what :meth:`_fuser_of` returns."""

    def _fuser_of(self, group: int) -> Any:
        """The fuser of a group of operations; there is one group but in a sequence."""
        raise NotImplementedError

    def _guard_trace(self) -> None:
        """Makes code that is being traced depend on what the modules inside are."""
        for path in self._paths_of_stamps():
            at(self, path)._stamp.guard()

    def _guard_identity(self) -> None:
        """The same, and on which modules these are, for code that may read anything of them."""
        for path in self._paths_of_stamps():
            at(self, path)._serial.strip()

    def _paths_of_stamps(self) -> tuple[Path, ...]:
        self._prepare_tracing()
        tracked = [(p, m) for p, m in paths(self).values() if isinstance(m, Tracked)]
        for _, module in tracked:
            module._refresh_stamp()
        return tuple(path for path, _ in tracked)

    def _parameters_for_tracing(self, group: int, extra_inputs: int) -> tuple[Any, ...]:
        """Where a group's parameters stand, as of :class:`TracedParameter`."""
        own = self._fuser_of(group).parameters_for_tracing(paths(self), extra_inputs)
        return tuple(map(tuple, own))

    def _plan_for_tracing(self, group: int, *call: Any) -> tuple[str, bool]:
        """As of the fuser of a group."""
        found: tuple[str, bool] = self._fuser_of(group).plan_for_tracing(*call)
        return found

    # What torch.compiler.assume_constant_result sets; calling it would import the compiler.
    _paths_of_stamps._dynamo_marked_constant = True  # type: ignore[attr-defined]
    _parameters_for_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
    _plan_for_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]

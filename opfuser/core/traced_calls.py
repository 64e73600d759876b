"""What torch.compile reads of the sequences and operations that it traces.

Dynamo guards each attribute that it reads. Code that reads what a call or a trace has left in a
module fits no module but this one, and would be traced anew for each layer of a model. So traced
code reads only what is there from the construction on, stamps and parameters, of modules that it
finds along paths from the one that is called; all else it is told as constants, which hold as long
as the stamps do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..torch_internals import constant_result
from .change_tracking import Tracked


class Functions:
    """What traced code looks up by name, as attributes.

    Of a dictionary the tracer would keep the state in which it saw it first, so that a sequence
    called twice in one graph would miss what the second call has added.
    """


class TracedParameter(NamedTuple):
    """Where a parameter stands.

    Attributes:
        module: the number of its module.
        name: in that module.
        computed: whether reading it computes it, as a parametrisation does.
    """

    module: int
    name: str
    computed: bool


def parameters_at(modules: list[Any], places: tuple[Any, ...]) -> list[Tensor]:
    """The values of :class:`TracedParameter`, of which a trace has plain tuples."""
    return [
        getattr(modules[number], name) if computed else modules[number]._parameters[name]
        for number, name, computed in places
    ]


class ModulesInside:
    """The modules in a sequence, an operation or a fuser that its calls read, each with a number.

    Attributes:
        modules: the outermost one first, which is a fuser if that is called.
        steps: for each other one the number of the module that holds it, and the attribute and the
            key or index by which it does so.
        numbers: of the modules, by id.
    """

    def __init__(self, root: Any) -> None:
        self.modules = [root]
        self.steps: list[tuple[int, str, str | int]] = []
        self.numbers = {id(root): 0}
        for number, module in enumerate(self.modules):  # which grows
            for attribute, key, inner in _held_by(module):
                if id(inner) in self.numbers or not (_is_read(module) or _leads_to_read(inner)):
                    continue
                self.numbers[id(inner)] = len(self.modules)
                self.modules.append(inner)
                self.steps.append((number, attribute, key))


def _is_read(module: Any) -> bool:
    """Whether calls read what a module holds: not if it is a plain one, which is only called."""
    return not isinstance(module, nn.Module) or isinstance(module, Tracked)


def _leads_to_read(module: nn.Module) -> bool:
    return any(isinstance(inner, Tracked) for inner in module.modules())


def _held_by(module: Any) -> Iterator[tuple[str, str | int, nn.Module]]:
    own = module.__dict__
    for name, child in own.get("_modules", {}).items():
        if child is not None:
            yield "_modules", name, child
    for attribute in ("basic_ops", "_given_ops"):  # of a compound, of a fuser
        for number, op in enumerate(own.get(attribute, ())):
            yield attribute, number, op


class TracedCalls:
    """What torch.compile may trace a call of: a sequence, an operation, or a fuser."""

    def _prepare_tracing(self) -> None:
        """Makes what :meth:`_fuser_of` returns."""

    def _fuser_of(self, group: int) -> Any:
        """The fuser of a group of operations; there is one group but in a sequence."""
        raise NotImplementedError

    def _guard_trace(self) -> list[Any]:
        """The modules inside. Code that is being traced depends on what they are from now on."""
        modules: list[Any] = [self]
        steps, tracked = self._steps_for_tracing()
        for holder, attribute, key in steps:
            modules.append(getattr(modules[holder], attribute)[key])
        for number in tracked:
            modules[number]._stamp.guard()
        return modules

    def _guard_identity(self, modules: list[Any]) -> None:
        """And on which modules they are, for code that may read anything of them."""
        _, tracked = self._steps_for_tracing()
        for number in tracked:
            modules[number]._serial.strip()

    @constant_result
    def _steps_for_tracing(self) -> tuple[Any, ...]:
        """The steps to the modules inside, and the numbers of those that have stamps."""
        self._prepare_tracing()
        inside = ModulesInside(self)
        tracked = [n for n, module in enumerate(inside.modules) if isinstance(module, Tracked)]
        for number in tracked:
            inside.modules[number]._refresh_stamp()
        return tuple(inside.steps), tuple(tracked)

    @constant_result
    def _parameters_for_tracing(self, group: int, extra_inputs: int) -> tuple[Any, ...]:
        """Where a group's parameters stand, as of :class:`TracedParameter`."""
        numbers = ModulesInside(self).numbers
        own = self._fuser_of(group).parameters_for_tracing(numbers, extra_inputs)
        return tuple(map(tuple, own))

    @constant_result
    def _plan_for_tracing(self, group: int, *call: Any) -> tuple[str, bool]:
        """As of the fuser of a group."""
        found: tuple[str, bool] = self._fuser_of(group).plan_for_tracing(*call)
        return found

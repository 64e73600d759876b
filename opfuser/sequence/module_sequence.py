"""The modules of a Sequential, as a list, and what is asked of one that another one calls."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from typing_extensions import Self

from ..core.change_tracking import Tracked
from ..core.context import TensorFacts
from ..core.traced_calls import TracedCalls
from ..engine.plan import Plan, Planned
from ..engine.routing import Channels, Routes
from ..errors import ArgumentTypeError, explain
from ..registry.configuration import FusionConfig

Facts = Tensor | TensorFacts
# The beginning of the paths of operations, and the configurations that hold for some of them.
Stands = tuple[str, tuple[tuple[str, FusionConfig], ...]]


class ModuleSequence(TracedCalls, Tracked):
    """Abstract. A Sequential as a list of modules, and as seen by another one that calls it."""

    fusion_config: FusionConfig | None
    _within: tuple[weakref.ref[ModuleSequence], str] | None  # what calls it, and the path there
    _stands: Stands
    _seen: int

    def _like(self, modules: Mapping[str, nn.Module]) -> Any:
        """A Sequential of other modules, with the settings of this one."""
        raise NotImplementedError

    def _init_recipe_state(self, module: nn.Module | None) -> None:
        """Called with each module that is added."""
        raise NotImplementedError

    def joins_outer(self) -> bool:
        """Whether its operations join those of the Sequential that holds it."""
        raise NotImplementedError

    @property
    def num_extra_inputs(self) -> int:
        """Number of extra inputs that the caller passes."""
        raise NotImplementedError

    @property
    def num_extra_outputs(self) -> int:
        """Number of extra outputs that the caller gets."""
        raise NotImplementedError

    @property
    def last_plan(self) -> Plan | None:
        """The plan that was used last, or None before the first call."""
        raise NotImplementedError

    def overrides_forward(self) -> bool:
        """Whether a call may do something else than run its modules in order."""
        raise NotImplementedError

    def planned_groups(self, x: Facts, extra_inputs: Sequence[Facts]) -> Planned:
        """As :meth:`Group.planned`, for all its modules."""
        raise NotImplementedError

    def own_channels(self) -> Channels:
        """Channels that it reads without producing them, and those that it produces."""
        raise NotImplementedError

    def connect(self, crossing: Channels, outer: ModuleSequence) -> None:
        """Makes it a module of ``outer``, and connects the channels that cross its border."""
        raise NotImplementedError

    def resolved_routes(self) -> Routes:
        """The routes of its channels and extra tensors, as its modules are now."""
        raise NotImplementedError

    def _keys(self, index: int | slice) -> list[str]:
        keys = list(self._modules)
        if isinstance(index, slice):
            return keys[index]
        if not isinstance(index, int):
            raise ArgumentTypeError.explained(
                "A Sequential is indexed by int or slice", received=type(index).__name__
            )
        if not -len(keys) <= index < len(keys):
            raise IndexError(
                explain(f"Index {index} is out of range", received=f"a Sequential of {len(keys)}")
            )
        return [keys[index]]

    def _next_key(self) -> str:
        return str(max((int(key) + 1 for key in self._modules if key.isdecimal()), default=0))

    def _rearrange(self, items: Iterable[tuple[str, nn.Module | None]]) -> None:
        """Replaces the modules. They keep their names; 0, 1, 2, … are numbered anew."""
        numbered = list(self._modules) == [str(n) for n in range(len(self._modules))]
        self._modules = {str(n) if numbered else key: m for n, (key, m) in enumerate(items)}
        self._touch()
        self._init_recipe_state(self)

    def _check_module(self, module: object) -> nn.Module:
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError.explained(
                "A Sequential holds operations and modules",
                received=type(module).__name__,
                remedy="Wrap a function in a torch.nn.Module, or write it as an operation",
            )
        return module

    def __getitem__(self, index: int | slice) -> Any:
        keys = self._keys(index)
        if isinstance(index, slice):
            return self._like({key: cast(nn.Module, self._modules[key]) for key in keys})
        return self._modules[keys[0]]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        if not isinstance(index, int):
            raise ArgumentTypeError.explained(
                "One module of a Sequential is set at a time",
                received=type(index).__name__,
                remedy="Set by int, or build a new Sequential",
            )
        self._modules[self._keys(index)[0]] = self._check_module(module)
        self._touch()
        self._init_recipe_state(module)

    def __delitem__(self, index: int | slice) -> None:
        removed = set(self._keys(index))
        self._rearrange([item for item in self._modules.items() if item[0] not in removed])

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(cast("Iterable[nn.Module]", self._modules.values()))

    def append(self, module: nn.Module) -> Self:
        """Adds a module at the end.

        Raises:
            ArgumentTypeError: ``module`` is no ``torch.nn.Module``.
        """
        self.add_module(self._next_key(), self._check_module(module))
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Self:
        """Adds modules at the end.

        Raises:
            ArgumentTypeError: one is no ``torch.nn.Module``; those before it have been added.
        """
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Self:
        """Adds a module before the one at ``index``.

        Modules with names keep them, and the new one gets the next free number. If all are named by
        their position, they are renumbered, as in ``torch.nn.Sequential``.

        Raises:
            IndexError: ``index`` is out of range.
            ArgumentTypeError: ``module`` is no ``torch.nn.Module``.
        """
        self._check_module(module)
        size = len(self._modules)
        if not -size <= index <= size:
            raise IndexError(
                explain(f"Index {index} is out of range", received=f"a Sequential of {size}")
            )
        items = list(self._modules.items())
        items.insert(index, (self._next_key(), module))
        self._rearrange(items)
        return self

    def pop(self, index: int | slice = -1) -> Any:
        """Removes and returns the module at ``index``."""
        module = self[index]
        del self[index]
        return module

    def __iadd__(self, modules: Iterable[nn.Module]) -> Self:
        return self.extend(modules)

    def __mul__(self, times: int) -> Any:
        if not isinstance(times, int) or times < 1:
            raise ArgumentTypeError.explained(
                "A Sequential is repeated a positive number of times", received=repr(times)
            )
        return self._like({str(n): m for n, m in enumerate([*self] * times)})

    __rmul__ = __mul__

    def __imul__(self, times: int) -> Self:
        return self.extend(list(self * times)[len(self) :])


def flatten(
    sequence: ModuleSequence, path: tuple[int, ...] = ()
) -> Iterator[tuple[nn.Module, Hashable]]:
    """The modules of a Sequential and of nested ones, each with the path to its Sequential."""
    for position, module in enumerate(sequence):
        if isinstance(module, ModuleSequence) and module.joins_outer():
            yield from flatten(module, (*path, position))
        else:
            yield module, path

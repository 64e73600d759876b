"""The registry: the fusions, in the order in which they are applied, and which of them are on."""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, TypeVar

from .errors import FusionError, UnknownFusionError, explain
from .fusion import (
    ANYWHERE,
    STAGES,
    Env,
    Fusion,
    FusionFunction,
    PatternElement,
    Refusal,
    Requires,
    Stage,
)
from .op import FusedOperation, FusibleOperation

__all__ = [
    "FusionHandle",
    "FusionInfo",
    "disable",
    "enable",
    "fusion",
    "fusions",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "registry",
]

F = TypeVar("F", bound=type[FusedOperation])


def fusion(
    *,
    stage: Stage,
    pattern: tuple[PatternElement, ...],
    name: str | None = None,
    refuses: Callable[..., Refusal | None] | None = None,
    requires: Requires = ANYWHERE,
    prepend: bool = False,
) -> Callable[[F], F]:
    """Class decorator: registers a FusedOperation subclass as the fusion of ``pattern``.

    The class is constructed with the matched operations as positional arguments, one per pattern
    element. Its registration handle becomes the class attribute ``handle``.

    Args:
        stage: ``"forward"``, ``"backward"``, or ``"joint"`` for both passes at once.
        pattern: operation classes in forward order, as of :class:`Fusion`.
        name: unique name; by default ``module:qualname`` of the class.
        refuses: as of :class:`Fusion`.
        requires: what the machine and the call must have.
        prepend: apply it before the fusions registered so far rather than after them.

    Raises:
        FusionError: the name is taken, or ``Fusion`` does not accept stage or pattern.
    """

    def register(cls: F) -> F:
        rule = Fusion(
            name=name or f"{cls.__module__}:{cls.__qualname__}",
            stage=stage,
            pattern=pattern,
            build=cls,
            refuses=refuses,
            requires=requires,
        )
        cls.handle = registry.add(rule, stage, prepend=prepend)
        return cls

    return register


class FusionInfo(NamedTuple):
    """One registered fusion, as listed by :func:`fusions`.

    Attributes:
        name: by which it is switched.
        stage: ``"forward"``, ``"backward"`` or ``"joint"``.
        origin: ``"opfuser"`` or ``"user"``.
        requires: what the machine and the call must have.
        enabled: whether it is on.
        disabled_by: what switched it off; empty if it is on.
    """

    name: str
    stage: Stage
    origin: str
    requires: Requires
    enabled: bool
    disabled_by: str


class FusionHandle:
    """A registered fusion: remove it, switch it off and on, or use it as a context manager.

    The functions that register a fusion return one. The block of ``with handle:`` ends by removing
    the fusion.

    Args:
        name: unique name.
        stage: ``"forward"``, ``"backward"`` or ``"joint"``.
        function: what is called with a list of operations, or a :class:`Fusion`.
        origin: ``"opfuser"`` or ``"user"``.
    """

    def __init__(self, name: str, stage: Stage, function: FusionFunction, origin: str) -> None:
        self.name = name
        self.stage: Stage = stage
        self.function = function
        self.origin = origin
        self._enabled = getattr(function, "enabled", True) is True
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._keywords = tuple(k for k in ("recipe", "env") if takes_all or k in parameters)

    @property
    def enabled(self) -> bool:
        """Whether the fusion is on; takes effect at the next call."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = bool(value)
        registry.changed()

    @property
    def requires(self) -> Requires:
        """What the machine and the call must have; nothing for a function."""
        return self.function.requires if isinstance(self.function, Fusion) else Requires()

    def disabled_by(self) -> str:
        """What switched the fusion off; empty if it is on."""
        if self.name in registry.switched:
            return "" if registry.switched[self.name][0] else registry.switched[self.name][1]
        if not self._enabled:
            return "handle" if self.origin != "opfuser" else "default"
        if "*" in registry.switched and not registry.switched["*"][0]:
            return registry.switched["*"][1]
        return ""

    def call(self, ops: Sequence[FusibleOperation], env: Env) -> Sequence[FusibleOperation]:
        """Calls the function with those of the keywords that its signature accepts."""
        offered = {"recipe": env.recipe, "env": env}
        return self.function(list(ops), **{k: offered[k] for k in self._keywords})

    def remove(self) -> None:
        """Unregisters the fusion; a second call does nothing."""
        registry.remove(self)

    def __enter__(self) -> FusionHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"FusionHandle({self.name!r}, stage={self.stage!r}, enabled={self.enabled})"


class Registry:
    """The ordered lists of fusions, one per stage. ``version`` changes with every change."""

    def __init__(self) -> None:
        self.handles: dict[Stage, list[FusionHandle]] = {stage: [] for stage in STAGES}
        self._switches: list[_Switches] = []
        self.switched: dict[str, tuple[bool, str]] = {}
        self.version = 0
        # The version as text, since torch.compile would trace a changing integer as a symbol.
        self.stamp = "version 0"
        self._told: set[str] = set()
        self._state: Hashable = None
        for variable, on in (("OPFUSER_DISABLE", False), ("OPFUSER_ENABLE", True)):
            names = filter(None, os.environ.get(variable, "").split(","))
            self._add_switches(None, {name.strip(): (on, variable) for name in names})

    def changed(self) -> None:
        """Records a change of the fusions or their switches: calls look for their plans again."""
        self.version += 1
        self.stamp = f"version {self.version}"
        self._state = None

    def state(self) -> Hashable:
        """A value that is equal whenever the same fusions are on, in the same order."""
        if self._state is None:
            self._state = tuple((handle, handle.disabled_by()) for handle in self)
        return self._state

    def tell_unknown(self) -> None:
        """Warns, once per name, of switched names that no fusion has when a plan is made."""
        known = {handle.name for handle in self} | {"*"}
        for name in set(self.switched) - known - self._told:
            self._told.add(name)
            logger.warning("%s names %r, but no fusion has that name", self.switched[name][1], name)

    def __len__(self) -> int:  # Dynamo calls it for every iterable
        return sum(map(len, self.handles.values()))

    def __iter__(self) -> Iterator[FusionHandle]:
        for stage in STAGES:
            yield from self.handles[stage]

    def add(
        self,
        function: FusionFunction,
        stage: Stage,
        *,
        prepend: bool = False,
        name: str | None = None,
        origin: str = "user",
    ) -> FusionHandle:
        if not callable(function):
            raise FusionError(
                explain("A fusion is a function of a list of operations", received=repr(function))
            )
        if isinstance(function, Fusion) and function.stage != stage:
            raise FusionError(
                explain(
                    "A fusion is registered for the stage that it declares",
                    where=f"fusion {function.name!r}",
                    received=f"stage {function.stage!r}, registered as {stage!r}",
                    remedy=f"Use the register function of the {function.stage} stage",
                )
            )
        given = name or (function.name if isinstance(function, Fusion) else None)
        taken = {handle.name for handle in self}
        if given is not None and given in taken:
            raise FusionError(
                explain(
                    "Names of fusions are unique",
                    received=f"a second fusion named {given!r}",
                    remedy="Remove the first one through its handle, or choose another name",
                )
            )
        handle = FusionHandle(given or _default_name(function, taken), stage, function, origin)
        self.handles[stage].insert(0 if prepend else len(self.handles[stage]), handle)
        self.changed()
        return handle

    def remove(self, handle: FusionHandle) -> None:
        if handle in self.handles[handle.stage]:
            self.handles[handle.stage].remove(handle)
            self.changed()

    def switch(self, owner: object, names: Sequence[str], on: bool, by: str) -> None:
        """Switches fusions by name until ``owner`` reverts it, for good once ``owner`` is gone."""
        known = {handle.name for handle in self} | {"*"}
        for name in names:
            if name not in known:
                raise UnknownFusionError(
                    explain(
                        "A fusion is switched by its registered name",
                        received=repr(name),
                        remedy=f"Choose among: {', '.join(sorted(known))}",
                    )
                )
        self._add_switches(owner, dict.fromkeys(names, (on, by)))
        self.changed()

    def take_back(self, owner: object) -> None:
        """Reverts what ``owner`` switched, and nothing else."""
        self._switches = [s for s in self._switches if s.owner is None or s.owner() is not owner]
        self._merge_switches()
        self.changed()

    def _add_switches(self, owner: object, names: dict[str, tuple[bool, str]]) -> None:
        self._switches.append(_Switches(None if owner is None else weakref.ref(owner), names))
        self._merge_switches()

    def _merge_switches(self) -> None:
        """Applies the last switch of each name; merges those that nobody can revert any more."""
        kept: list[_Switches] = []
        for switches in self._switches:
            for_good = switches.owner is None or switches.owner() is None
            if for_good and kept and kept[-1].owner is None:
                kept[-1].names.update(switches.names)
            else:
                kept.append(switches._replace(owner=None) if for_good else switches)
        self._switches = kept
        self.switched = {name: how for s in kept for name, how in s.names.items()}


class _Switches(NamedTuple):
    """What one call switched, and its owner; without one it is permanent."""

    owner: weakref.ref[object] | None
    names: dict[str, tuple[bool, str]]


def _default_name(function: FusionFunction, taken: set[str]) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    base = f"{named.__module__}:{named.__qualname__}"
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}#{count}"
    return name


logger = logging.getLogger("opfuser")
registry = Registry()


class _Switch:
    """Takes effect when made; as a context manager, until the block ends."""

    def __init__(self, names: Sequence[str], on: bool, by: str) -> None:
        registry.switch(self, names, on, by)

    def __enter__(self) -> _Switch:
        return self

    def __exit__(self, *_: object) -> None:
        registry.take_back(self)


def disable(*names: str) -> _Switch:
    """Switches fusions off; inside ``with``, until the block ends.

    Args:
        *names: of fusions; ``"*"`` for all but those that are switched by their names.

    Raises:
        UnknownFusionError: no fusion has that name.
    """
    return _Switch(names, False, "opfuser.disable")


def enable(*names: str) -> _Switch:
    """Switches fusions on; inside ``with``, until the block ends.

    Args:
        *names: of fusions, as of :func:`disable`.

    Raises:
        UnknownFusionError: no fusion has that name.
    """
    return _Switch(names, True, "opfuser.enable")


def fusions() -> list[FusionInfo]:
    """All registered fusions in the order in which they are applied."""
    return [
        FusionInfo(h.name, h.stage, h.origin, h.requires, not h.disabled_by(), h.disabled_by())
        for h in registry
    ]


def register_forward_fusion(
    func: FusionFunction, prepend: bool = False, *, name: str | None = None
) -> FusionHandle:
    """Registers a fusion of the forward pass.

    Args:
        func: a :class:`Fusion`, or ``func(ops, *, recipe) -> ops``; called with those of the
            keywords ``recipe`` and ``env`` that its signature accepts.
        prepend: apply it before the fusions registered so far rather than after them.
        name: unique name; by default that of the ``Fusion``, or ``module:qualname``.

    Returns:
        A handle with ``remove()`` and ``enabled``; as a context manager it removes the fusion at
        the end of the block.

    Raises:
        FusionError: the name is taken, or a ``Fusion`` declares another stage.
    """
    return registry.add(func, "forward", prepend=prepend, name=name)


def register_backward_fusion(
    func: FusionFunction, prepend: bool = False, *, name: str | None = None
) -> FusionHandle:
    """Registers a fusion of the backward pass; see :func:`register_forward_fusion`.

    Args:
        func: as there; lists are in forward order, here too.
        prepend: as there.
        name: as there.

    Raises:
        FusionError: as there.
    """
    return registry.add(func, "backward", prepend=prepend, name=name)


def register_forward_backward_fusion(
    func: FusionFunction, prepend: bool = False, *, name: str | None = None
) -> FusionHandle:
    """Registers a fusion of both passes at once; see :func:`register_forward_fusion`.

    Joint fusions are applied before the forward-only and backward-only ones.

    Args:
        func: as there.
        prepend: as there.
        name: as there.

    Raises:
        FusionError: as there.
    """
    return registry.add(func, "joint", prepend=prepend, name=name)

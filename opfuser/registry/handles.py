"""The registry: the fusions, in the order in which they are applied, and which of them are on."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from ..core.fusion import STAGES, Env, Fusion, FusionFunction, Requires, Stage
from ..core.op_base import FusibleOperation
from ..errors import FusionError, UnknownFusionError, choose_among
from .configuration import FusionConfig, Place, Setting, in_order, settings_at
from .configuration_files import read
from .entry_points import PluginInfo, load_all


class FusionHandle:
    """A registered fusion: remove it, switch it off and on, or use it as a context manager.

    The functions that register a fusion return one. The block of ``with handle:`` ends by removing
    the fusion.

    Args:
        name: unique name.
        stage: ``"forward"``, ``"backward"`` or ``"joint"``.
        function: what is called with a list of operations, or a :class:`Fusion`.
        origin: ``"opfuser"``, a plug-in's package, or ``"user"``.
    """

    def __init__(self, name: str, stage: Stage, function: FusionFunction, origin: str) -> None:
        self.name = name
        self.stage: Stage = stage
        self.function = function
        self.origin = origin
        self.by_default = getattr(function, "enabled", True) is True
        self._enabled: bool | None = None
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._keywords = tuple(k for k in ("recipe", "env") if takes_all or k in parameters)

    @property
    def enabled(self) -> bool:
        """Whether the fusion is on; takes effect at the next call."""
        return self.by_default if self._enabled is None else self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = bool(value)
        registry.changed()

    @property
    def requires(self) -> Requires:
        """What the machine and the call must have; nothing for a function."""
        return self.function.requires if isinstance(self.function, Fusion) else Requires()

    def switched(self) -> Setting | None:
        """The switch that turns the fusion on or off; None where configurations decide."""
        switched = registry.switched
        if self.name in switched:
            return self._says(*switched[self.name])
        if self._enabled is False:
            return self._says(False, "handle")
        if "*" in switched and not switched["*"][0]:
            return self._says(*switched["*"])
        return None if self._enabled is None else self._says(True, "handle")

    def _says(self, on: bool, by: str) -> Setting:
        return Setting(self.name, "enabled", on, "", by)

    def setting(self, place: Place | None = None) -> Setting:
        """What turns the fusion on or off at a place, without one where no override holds."""
        switched = self.switched()
        if switched is not None:
            return switched
        stated = settings_at(self.name, registry.configs, place)
        return stated.get("enabled") or self._says(self.by_default, "default")

    def disabled_by(self) -> str:
        """What switched the fusion off; empty if it is on, but for overrides."""
        found = self.setting()
        return "" if found.value else found.origin

    def call(self, ops: Sequence[FusibleOperation], env: Env) -> Sequence[FusibleOperation]:
        """Calls the function with those of the keywords that its signature accepts."""
        offered = {"recipe": env.recipe, "env": env}
        return self.function(list(ops), **{k: offered[k] for k in self._keywords})

    def remove(self) -> None:
        """Unregisters the fusion; a second call does nothing."""
        registry.remove(self)

    def __enter__(self) -> FusionHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"FusionHandle({self.name!r}, stage={self.stage!r}, enabled={self.enabled})"


T = TypeVar("T")


class _ReversibleChanges(Generic[T]):
    """Changes in order, which whoever made them can take back without undoing those of others.

    Args:
        merged: one change that does what two in a row do. Those that nobody can take back any more
            are merged, so that they do not pile up.
    """

    def __init__(self, merged: Callable[[T, T], T]) -> None:
        self._merged = merged
        self._made: list[tuple[weakref.ref[object] | None, T]] = []

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[T]:
        return iter([change for _, change in self._made])

    def add(self, owner: object, change: T) -> None:
        """Adds a change that is for good if ``owner`` is None, or once it is gone."""
        self._made.append((None if owner is None else weakref.ref(owner), change))
        self._merge()

    def take_back(self, owner: object) -> None:
        """Removes the changes of ``owner``, and nothing else."""
        self._made = [made for made in self._made if made[0] is None or made[0]() is not owner]
        self._merge()

    def _merge(self) -> None:
        kept: list[tuple[weakref.ref[object] | None, T]] = []
        for ref, change in self._made:
            owner = None if ref is None or ref() is None else ref
            if owner is None and kept and kept[-1][0] is None:
                kept[-1] = None, self._merged(kept[-1][1], change)
            else:
                kept.append((owner, change))
        self._made = kept


class _Registering(threading.local):
    """For what this thread registers fusions."""

    origin = "user"


class Registry:
    """The ordered lists of fusions, one per stage. ``version`` changes with every change.

    Plug-ins and the file of ``OPFUSER_CONFIG`` are loaded when fusions are first iterated over.
    """

    def __init__(self) -> None:
        self.handles: dict[Stage, list[FusionHandle]] = {stage: [] for stage in STAGES}
        self._switches = _ReversibleChanges[dict[str, tuple[bool, str]]](lambda a, b: {**a, **b})
        self.switched: dict[str, tuple[bool, str]] = {}
        self._configs = _ReversibleChanges(FusionConfig.followed_by)
        self.configs: tuple[FusionConfig, ...] = ()
        self.plugins: tuple[PluginInfo, ...] = ()
        self._plugins_are_loaded = self._is_loading = False
        self._loading = threading.RLock()
        self._changing = threading.RLock()  # not held while a module is imported
        self._registering = _Registering()
        self._file = os.environ.get("OPFUSER_CONFIG", "")
        self._folder = os.getcwd() if self._file else ""
        self.version = 0
        # The version as text, since torch.compile would trace a changing integer as a symbol.
        self.stamp = "version 0"
        self._told: set[str] = set()
        self._state: tuple[Hashable, Hashable] | None = None
        self._ordered: list[FusionHandle] | None = None
        for variable, on in (("OPFUSER_DISABLE", False), ("OPFUSER_ENABLE", True)):
            names = filter(None, os.environ.get(variable, "").split(","))
            self._switches.add(None, {name.strip(): (on, variable) for name in names})
        self._apply()

    def changed(self) -> None:
        """Records a change of the fusions or their switches: calls look for their plans again."""
        with self._changing:
            self.version += 1
            self.stamp = f"version {self.version}"
            self._state = None
            self._ordered = None

    def state(self) -> tuple[Hashable, Hashable]:
        """The fusions in their order, each with what switches it off, and the configurations."""
        state = self._state
        if state is None:
            self._load()
            with self._changing:
                on = tuple((handle, handle.disabled_by()) for handle in self._in_order())
                self._state = state = on, self.configs
        return state

    def registered(self) -> list[FusionHandle]:
        """In the order of registration, with plug-ins if they have been loaded."""
        return [handle for stage in STAGES for handle in self.handles[stage]]

    def stages(self) -> dict[str, Stage]:
        """The stage of each fusion, by name; plug-ins are loaded."""
        self._load_plugins()
        return {handle.name: handle.stage for handle in self.registered()}

    def _load(self) -> None:
        self._load_plugins()
        self._load_file()

    def _load_plugins(self) -> None:
        if self._plugins_are_loaded:
            return
        with self._loading:  # other threads wait; a plug-in that asks for fusions comes by again
            if not self._plugins_are_loaded and not self._is_loading:
                self._is_loading = True
                try:
                    self.plugins = load_all(self._registering_for, self._add_of_plugin)
                    self._plugins_are_loaded = True
                finally:
                    self._is_loading = False

    def _load_file(self) -> None:
        """Reads the file of ``OPFUSER_CONFIG``; at each call again, until that succeeds."""
        if not self._file:
            return
        with self._loading:
            if self._file and not self._is_loading:
                config = read(self._path(self._file), self.stages(), "OPFUSER_CONFIG")
                with self._changing:
                    self._configs.add(None, config)
                    self._file = ""
                    self._apply()

    @contextmanager
    def _registering_for(self, origin: str) -> Iterator[list[FusionHandle]]:
        """A block in which fusions get this origin; an error removes those registered in it."""
        before = {handle: handle.origin for handle in self.registered()}
        made: list[FusionHandle] = []
        self._registering.origin = origin
        try:
            yield made
        except BaseException:
            for handle in self.registered():
                if handle not in before and handle.origin == origin:
                    self.remove(handle)
            raise
        finally:
            self._registering.origin = "user"
        made += [h for h in self.registered() if h.origin == origin != before.get(h)]

    def _add_of_plugin(self, rule: Fusion) -> None:
        """Registers a plug-in's fusion, unless the program has done so; it then gets the origin."""
        for handle in self.registered():
            if handle.function is rule:
                handle.origin = self._registering.origin
                return
        self.add(rule, rule.stage)

    def tell_unknown(self) -> None:
        """Warns, once per name, of switched names that no fusion has when a plan is made."""
        known = {handle.name for handle in self} | {"*"}
        named = {name: by for name, (_, by) in self.switched.items()}
        for config in self.configs:
            named.update(dict.fromkeys(config.names, config.source))
        for name in set(named) - known - self._told:
            self._told.add(name)
            logger.warning("%s names %r, but no fusion has that name", named[name], name)

    def __len__(self) -> int:  # Dynamo calls it for every iterable
        return sum(map(len, self.handles.values()))

    def __iter__(self) -> Iterator[FusionHandle]:
        """The fusions in the order in which they run."""
        self._load()
        return iter(self._in_order())

    def _in_order(self) -> list[FusionHandle]:
        ordered = self._ordered
        if ordered is None:
            with self._changing:
                ordered = []
                for stage in STAGES:
                    by_name = {handle.name: handle for handle in self.handles[stage]}
                    names = list(by_name)
                    for order in (order for config in self.configs for order in config.orders):
                        names = in_order(names, order)
                    ordered += [by_name[name] for name in names]
                self._ordered = ordered
        return ordered

    def add(
        self,
        function: FusionFunction,
        stage: Stage,
        *,
        prepend: bool = False,
        name: str | None = None,
        origin: str | None = None,
    ) -> FusionHandle:
        if not callable(function):
            raise FusionError.explained(
                "A fusion is a function of a list of operations", received=repr(function)
            )
        if isinstance(function, Fusion) and function.stage != stage:
            raise FusionError.explained(
                "A fusion is registered for the stage that it declares",
                where=f"fusion {function.name!r}",
                received=f"stage {function.stage!r}, registered as {stage!r}",
                remedy=f"Use the register function of the {function.stage} stage",
            )
        given = name or (function.name if isinstance(function, Fusion) else None)
        taken = {handle.name for handle in self.registered()}
        if given is not None and given in taken:
            raise FusionError.explained(
                "Names of fusions are unique",
                received=f"a second fusion named {given!r}",
                remedy="Remove the first one through its handle, or choose another name",
            )
        origin = origin or self._registering.origin
        handle = FusionHandle(given or _default_name(function, taken), stage, function, origin)
        there = self.handles[stage]
        # Those of plug-ins stand where they would if they were loaded at import.
        among = [n for n, h in enumerate(there) if origin == "user" or h.origin != "user"]
        ends = (among[0], among[-1] + 1) if among else (0, 0)
        there.insert(ends[0] if prepend else ends[1], handle)
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
                raise UnknownFusionError.explained(
                    "A fusion is switched by its registered name",
                    received=repr(name),
                    remedy=choose_among(name, known),
                )
        with self._changing:
            self._switches.add(owner, dict.fromkeys(names, (on, by)))
            self._apply()

    def configure(self, owner: object, config: FusionConfig) -> None:
        """Applies a configuration until ``owner`` reverts it, for good once ``owner`` is gone."""
        self._load_file()  # which comes first, whenever it is read
        with self._changing:
            self._configs.add(owner, config)
            self._apply()

    def take_back(self, owner: object) -> None:
        """Reverts what ``owner`` switched or configured, and nothing else."""
        with self._changing:
            self._switches.take_back(owner)
            self._configs.take_back(owner)
            self._apply()

    def _apply(self) -> None:
        """What is switched and configured now; the last switch of a name counts."""
        self.switched = {name: how for names in self._switches for name, how in names.items()}
        self.configs = tuple(self._configs)
        self.changed()

    def read(
        self, source: FusionConfig | Mapping[str, Any] | str | os.PathLike[str], given_to: str
    ) -> FusionConfig:
        """The configuration that a file or a mapping states; see :func:`fusion_config`."""
        return read(source, self.stages(), given_to)

    def _path(self, file: str) -> str:
        """A path of the environment, as of the folder in which opfuser was imported."""
        inside = os.getcwd() == self._folder or os.path.isabs(file)
        return file if inside else os.path.join(self._folder, file)


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

"""Fusions as data, the one scan that matches them, and the registry that holds them in order."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch

from .errors import FusionError, UnknownFusionError, explain
from .op import FusedOperation, FusibleOperation

__all__ = [
    "Env",
    "Fusion",
    "FusionHandle",
    "FusionInfo",
    "Optional",
    "Refusal",
    "Requires",
    "disable",
    "enable",
    "fusion",
    "fusions",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]

Stage = Literal["joint", "forward", "backward"]
STAGES: tuple[Stage, ...] = ("joint", "forward", "backward")
FusionFunction = Callable[..., Sequence[FusibleOperation]]

REFUSAL_CODES = frozenset(
    "DTYPE SHAPE LAYOUT DEVICE MISSING_PACKAGE COMMUNICATION IN_PLACE EXTRA_OUTPUT_USED SHARED_OP "
    "HOOK GROUP_SPLIT CONFLICT DISABLED NO_RECIPE NO_GRAD AUTOCAST SUBCLASS ERROR".split()
)


class Refusal(NamedTuple):
    """Why a fusion declined: a code of ``REFUSAL_CODES`` and a sentence for the reader."""

    code: str
    detail: str

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


@dataclass(frozen=True)
class Requires:
    """What a fusion needs of the machine; where it is missing the fusion is skipped.

    Args:
        device: device type the fusion is for, such as ``"cuda"``; None for any.
        min_capability: lowest compute capability as major * 10 + minor, such as 90.
        package: a package that must be importable.
    """

    device: str | None = None
    min_capability: int | None = None
    package: str | None = None

    def missing(self, env: Env) -> Refusal | None:
        if self.device is not None and env.device.type != self.device:
            return Refusal("DEVICE", f"needs {self.device}, have {env.device.type}")
        if self.min_capability is not None and env.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(env.device)
            if major * 10 + minor < self.min_capability:
                return Refusal(
                    "DEVICE", f"needs sm_{self.min_capability}, have sm_{major * 10 + minor}"
                )
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return Refusal("MISSING_PACKAGE", f"needs the package {self.package}")
        return None


@dataclass(frozen=True)
class Env:
    """All that a fusion may read besides the operations themselves; every field is in the plan key.

    Attributes:
        device, dtype: of the input of the run of operations.
        autocast_dtype: dtype of the active autocast region, or None.
        grad_enabled: whether grad mode is on.
        needs_backward: for each basic operation, whether its backward will run.
        recipe: quantisation recipe; always None until there is quantised compute.
    """

    device: torch.device
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None = None
    grad_enabled: bool = False
    needs_backward: tuple[bool, ...] = ()
    recipe: Any | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that operations compute in: that of autocast, else the input's."""
        return self.autocast_dtype or self.dtype


class Optional:
    """A pattern element that may be absent; ``refuses`` and ``build`` then receive None for it."""

    def __init__(self, *types: type[FusibleOperation]) -> None:
        self.types = types


PatternElement = type[FusibleOperation] | tuple[type[FusibleOperation], ...] | Optional


class _Element(NamedTuple):
    types: tuple[type[FusibleOperation], ...]
    optional: bool

    @property
    def name(self) -> str:
        return "|".join(t.__name__ for t in self.types)


def _expand(pattern: Sequence[PatternElement], name: str) -> tuple[_Element, ...]:
    out: list[_Element] = []
    for element in pattern:
        types = element.types if isinstance(element, Optional) else element
        types = types if isinstance(types, tuple) else (types,)
        if not types or not all(
            isinstance(t, type) and issubclass(t, FusibleOperation) for t in types
        ):
            raise FusionError(
                explain(
                    "A pattern consists of operation classes, tuples of them, and Optional(...)",
                    where=f"fusion {name!r}",
                    received=repr(element),
                )
            )
        parts = getattr(types[0], "pattern_parts", None)
        if parts is not None and len(types) == 1 and not isinstance(element, Optional):
            out.extend(_expand(parts(), name))
        else:
            out.append(_Element(types, isinstance(element, Optional)))
    if all(e.optional for e in out):
        raise FusionError(
            explain(
                "A pattern needs at least one element that is not optional",
                where=f"fusion {name!r}",
            )
        )
    return tuple(out)


class Match(NamedTuple):
    """One place where a pattern fits: operations ``start`` to ``stop`` of the list scanned."""

    start: int
    stop: int
    parts: tuple[FusibleOperation | None, ...]


class NearMiss(NamedTuple):
    """The longest part of a pattern that fitted somewhere, and what stopped it."""

    start: int
    matched: int
    of: int
    stopped_by: Refusal


def _match(
    pattern: tuple[_Element, ...], ops: Sequence[FusibleOperation], start: int
) -> Match | NearMiss:
    """Fits ``pattern`` at ``ops[start]``; optional elements are taken where that leads to a match."""
    best: NearMiss | None = None

    def step(element: int, at: int, parts: tuple[FusibleOperation | None, ...]) -> Match | None:
        nonlocal best
        if element == len(pattern):
            return Match(start, at, parts)
        wanted = pattern[element]
        if at < len(ops) and type(ops[at]) in wanted.types:
            found = step(element + 1, at + 1, (*parts, ops[at]))
            if found is not None:
                return found
        elif best is None or element > best.matched:
            best = NearMiss(start, element, len(pattern), _why(wanted, ops, at))
        return step(element + 1, at, (*parts, None)) if wanted.optional else None

    found = step(0, start, ())
    if found is not None:
        return found
    return best or NearMiss(start, 0, len(pattern), _why(pattern[0], ops, start))


def _why(wanted: _Element, ops: Sequence[FusibleOperation], at: int) -> Refusal:
    if at >= len(ops):
        return Refusal("GROUP_SPLIT", f"the run of operations ends where {wanted.name} is expected")
    op = ops[at]
    if isinstance(op, wanted.types):
        return Refusal("SUBCLASS", f"{type(op).__name__} is a subclass of {wanted.name}")
    if isinstance(op, FusedOperation) and isinstance(op.basic_ops[0], wanted.types):
        return Refusal("CONFLICT", f"{wanted.name} is already part of {type(op).__name__}")
    return Refusal("LAYOUT", f"{wanted.name} is expected where {type(op).__name__} stands")


class Scan(NamedTuple):
    """What one fusion did to a list of operations."""

    ops: list[FusibleOperation]
    matches: list[Match]
    refusals: list[tuple[int, Refusal]]
    near_miss: NearMiss | None


@dataclass(frozen=True)
class Fusion:
    """A fusion as data: what it looks for, when it declines, and what it puts there.

    Args:
        name: unique name, used in records, configuration and logs.
        stage: ``"forward"``, ``"backward"``, or ``"joint"`` for both passes at once.
        pattern: operation classes in forward order. Exact types only. An element may be a tuple
            of alternatives or ``Optional(...)``. A compound such as ``Linear`` stands for its parts.
        build: called with the matched operations, one argument per pattern element (None for an
            absent optional one); returns the FusedOperation.
        refuses: called like ``build`` and with ``env=``; returns a :class:`Refusal`, or None.
        requires: what the machine must have.
        enabled: whether the fusion is on when registered.

    A ``Fusion`` is itself a fusion function, so that it can be registered beside hand-written ones.
    """

    name: str
    stage: Stage
    pattern: tuple[PatternElement, ...]
    build: Callable[..., FusedOperation]
    refuses: Callable[..., Refusal | None] | None = None
    requires: Requires = Requires()
    enabled: bool = True
    elements: tuple[_Element, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise FusionError(
                explain(
                    f"The stage of a fusion is one of {', '.join(STAGES)}",
                    where=f"fusion {self.name!r}",
                    received=repr(self.stage),
                )
            )
        object.__setattr__(self, "elements", _expand(self.pattern, self.name))

    def __call__(
        self, ops: Sequence[FusibleOperation], *, recipe: Any | None = None, env: Env | None = None
    ) -> list[FusibleOperation]:
        if env is None:
            env = Env(torch.get_default_device(), torch.get_default_dtype(), recipe=recipe)
        return self.scan(ops, env).ops

    def scan(
        self,
        ops: Sequence[FusibleOperation],
        env: Env,
        veto: Callable[[int, int], Refusal | None] | None = None,
    ) -> Scan:
        """Replaces matches greedily from the left.

        Args:
            veto: the engine's own objection to fusing ``ops[start:stop]``, if any.
        """
        out: list[FusibleOperation] = []
        matches: list[Match] = []
        refusals: list[tuple[int, Refusal]] = []
        near: NearMiss | None = None
        at = 0
        while at < len(ops):
            found = _match(self.elements, ops, at)
            if isinstance(found, Match):
                no = veto(found.start, found.stop) if veto is not None else None
                if no is None and self.refuses is not None:
                    no = self._checked(self.refuses(*found.parts, env=env))
                if no is None:
                    out.append(self.build(*found.parts))
                    matches.append(found)
                    at = found.stop
                    continue
                refusals.append((found.start, no))
            elif found.matched and (near is None or found.matched > near.matched):
                near = found
            out.append(ops[at])
            at += 1
        return Scan(out, matches, refusals, near)

    def _checked(self, no: Any) -> Refusal | None:
        if no is None or (isinstance(no, Refusal) and no.code in REFUSAL_CODES):
            return cast("Refusal | None", no)
        raise FusionError(
            explain(
                f"refuses() returns None or a Refusal with one of the codes {sorted(REFUSAL_CODES)}",
                where=f"fusion {self.name!r}",
                received=repr(no),
            )
        )


F = TypeVar("F", bound=type[FusedOperation])


def fusion(
    *,
    stage: Stage,
    pattern: tuple[PatternElement, ...],
    name: str | None = None,
    refuses: Callable[..., Refusal | None] | None = None,
    requires: Requires = Requires(),
    prepend: bool = False,
) -> Callable[[F], F]:
    """Class decorator: registers a FusedOperation subclass as the fusion of ``pattern``.

    The class is built with the matched operations as positional arguments, one per pattern
    element. Its registration handle is kept as the class attribute ``handle``.
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
        cls.handle = registry.add(rule, stage, prepend=prepend)  # type: ignore[attr-defined]
        return cls

    return register


class FusionInfo(NamedTuple):
    """One registered fusion, as listed by :func:`fusions`."""

    name: str
    stage: Stage
    origin: str
    requires: Requires
    enabled: bool
    disabled_by: str


class FusionHandle:
    """A registered fusion: remove it, switch it off and on, or use it as a context manager."""

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
        """Calls the function with those of our keywords that its signature takes."""
        offered = {"recipe": env.recipe, "env": env}
        return self.function(list(ops), **{k: offered[k] for k in self._keywords})

    def remove(self) -> None:
        """Unregister the fusion; a second call does nothing."""
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
        self.switched: dict[str, tuple[bool, str]] = {}
        self.version = 0
        for variable, on in (("OPFUSER_DISABLE", False), ("OPFUSER_ENABLE", True)):
            for name in filter(None, os.environ.get(variable, "").split(",")):
                self.switched[name.strip()] = (on, variable)

    def changed(self) -> None:
        self.version += 1

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

    def switch(self, names: Sequence[str], on: bool, by: str) -> dict[str, tuple[bool, str]]:
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
        before = dict(self.switched)
        self.switched = {**before, **{name: (on, by) for name in names}}
        self.changed()
        return before


def _default_name(function: FusionFunction, taken: set[str]) -> str:
    base = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', repr(function))}"
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}#{count}"
    return name


registry = Registry()


class _Switch:
    """Takes effect when made; as a context manager, until the block ends."""

    def __init__(self, names: Sequence[str], on: bool, by: str) -> None:
        self._before = registry.switch(names, on, by)

    def __enter__(self) -> _Switch:
        return self

    def __exit__(self, *_: object) -> None:
        registry.switched = self._before
        registry.changed()


def disable(*names: str) -> _Switch:
    """Switch fusions off by name (``"*"``: all); inside ``with``, until the block ends."""
    return _Switch(names, False, "opfuser.disable")


def enable(*names: str) -> _Switch:
    """Switch fusions on by name; inside ``with``, until the block ends."""
    return _Switch(names, True, "opfuser.enable")


def fusions() -> list[FusionInfo]:
    """All registered fusions in the order in which they run."""
    return [
        FusionInfo(h.name, h.stage, h.origin, h.requires, not h.disabled_by(), h.disabled_by())
        for h in registry
    ]


def register_forward_fusion(
    func: FusionFunction, prepend: bool = False, *, name: str | None = None
) -> FusionHandle:
    """Register a fusion of the forward pass.

    Args:
        func: a :class:`Fusion`, or ``func(ops, *, recipe) -> ops``; called with those of the
            keywords ``recipe`` and ``env`` that its signature accepts.
        prepend: run before the fusions registered so far rather than after them.
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
    """Register a fusion of the backward pass; see :func:`register_forward_fusion`."""
    return registry.add(func, "backward", prepend=prepend, name=name)


def register_forward_backward_fusion(
    func: FusionFunction, prepend: bool = False, *, name: str | None = None
) -> FusionHandle:
    """Register a fusion of both passes at once; see :func:`register_forward_fusion`.

    Joint fusions run before the forward-only and backward-only ones.
    """
    return registry.add(func, "joint", prepend=prepend, name=name)

"""Fusions as data, and the one scan that matches them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch

from ..errors import FusionError
from ..recipe import Recipe
from ..runtime.libraries import installed
from .op_base import FusedOperation, FusibleOperation

__all__ = ["Env", "Fusion", "Optional", "QuantizedEdge", "Refusal", "Repeated", "Requires"]

Stage = Literal["joint", "forward", "backward"]
STAGES: tuple[Stage, ...] = ("joint", "forward", "backward")
FusionFunction = Callable[..., Sequence[FusibleOperation]]

REFUSAL_CODES = frozenset(
    "DTYPE SHAPE LAYOUT DEVICE MISSING_PACKAGE COMMUNICATION IN_PLACE EXTRA_OUTPUT_USED SHARED_OP "
    "HOOK FORWARD GROUP_SPLIT CONFLICT DISABLED NO_RECIPE NO_GRAD AUTOCAST SUBCLASS ERROR".split()
)


class QuantizedEdge(NamedTuple):
    """A tensor that one operation hands to another one, or to its own backward, as codes.

    Attributes:
        stage: ``"forward"``, from ``source`` to ``target`` behind it; ``"backward"``, from
            ``source`` to ``target`` before it; or ``"joint"``, the input of ``source`` to its own
            backward: ``target`` is the same.
        source, target: the basic operations, by index.
        dtype: of the codes.
        rows, cols: their layouts.
    """

    stage: Stage
    source: int
    target: int
    dtype: torch.dtype
    rows: bool
    cols: bool

    def behind(self, count: int) -> QuantizedEdge:
        """The same one behind so many more operations."""
        return self._replace(source=self.source + count, target=self.target + count)

    def __str__(self) -> str:
        layouts = " and ".join(n for n, has in zip(("rows", "columns"), self[4:]) if has)
        dtype = str(self.dtype).removeprefix("torch.")
        what = f"{self.stage} {self.source} -> {self.target}"
        if self.stage == "joint":
            what = f"saved input of {self.source}"
        return f"{what}: {dtype} by {layouts}"


class Refusal(NamedTuple):
    """The reason why a fusion was not applied: a code and a sentence.

    Attributes:
        code: one of ``REFUSAL_CODES``.
        detail: a sentence for the reader.
    """

    code: str
    detail: str

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


@dataclass(frozen=True)
class Requires:
    """What a fusion requires of the machine and the call; without it, the fusion is skipped.

    Args:
        device: device type the fusion is for, such as ``"cuda"``; None for any.
        min_capability: lowest compute capability as major * 10 + minor, such as 90.
        package: a package that must be importable.
        recipe: whether a recipe of quantised compute must be active.
    """

    device: str | None = None
    min_capability: int | None = None
    package: str | None = None
    recipe: bool = False

    def missing(self, env: Env) -> Refusal | None:
        """What machine and call lack, or None."""
        if self.device is not None and env.device.type != self.device:
            return Refusal("DEVICE", f"needs {self.device}, have {env.device.type}")
        if self.min_capability is not None and env.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(env.device)
            if major * 10 + minor < self.min_capability:
                return Refusal(
                    "DEVICE", f"needs sm_{self.min_capability}, have sm_{major * 10 + minor}"
                )
        if self.package is not None and not installed(self.package):
            return Refusal("MISSING_PACKAGE", f"needs the package {self.package}")
        if self.recipe and env.recipe is None:
            return Refusal("NO_RECIPE", "no recipe of quantised compute is active")
        return None


ANYWHERE = Requires()


@dataclass(frozen=True)
class Env:
    """Everything that a fusion may read besides the operations; each field is in the plan key.

    Attributes:
        device, dtype: of the input of the group.
        autocast_dtype: dtype of the active autocast region, or None.
        grad_enabled: whether grad mode is on.
        needs_backward: for each basic operation, whether its backward will run.
        recipe: of quantised compute, or None.
    """

    device: torch.device
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None = None
    grad_enabled: bool = False
    needs_backward: tuple[bool, ...] = ()
    recipe: Recipe | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that operations compute in: that of autocast, else the input's."""
        return self.autocast_dtype or self.dtype


class Optional:
    """A pattern element that may be absent; ``refuses`` and ``build`` then receive None for it.

    Args:
        *types: operation classes, one of which stands there.
    """

    def __init__(self, *types: type[FusibleOperation]) -> None:
        self.types = types


class Repeated:
    """A pattern element that matches consecutive operations, as many as possible.

    ``refuses`` and ``build`` receive them as a tuple, which may be empty where ``at_least`` is 0.

    Args:
        name: what the operations have in common, for the reader of records.
        accepts: whether the element matches an operation. It must not accept a subclass that
            computes something else.
        at_least: how many operations there must be.
    """

    def __init__(
        self, name: str, accepts: Callable[[FusibleOperation], bool], *, at_least: int = 1
    ) -> None:
        self.name = name
        self.accepts = accepts
        self.at_least = at_least


PatternElement = type[FusibleOperation] | tuple[type[FusibleOperation], ...] | Optional | Repeated


class _Element(NamedTuple):
    types: tuple[type[FusibleOperation], ...]
    optional: bool
    repeated: Repeated | None = None

    @property
    def name(self) -> str:
        if self.repeated is not None:
            return self.repeated.name
        names = [t.__name__ for t in self.types]
        if len(names) > 4:
            names[3:] = [f"{len(names) - 3} more"]
        return "|".join(names)


def _expand(pattern: Sequence[PatternElement], name: str) -> tuple[_Element, ...]:
    out: list[_Element] = []
    for element in pattern:
        if isinstance(element, Repeated):
            out.append(_Element((), element.at_least == 0, element))
            continue
        types = element.types if isinstance(element, Optional) else element
        types = types if isinstance(types, tuple) else (types,)
        if not types or not all(
            isinstance(t, type) and issubclass(t, FusibleOperation) for t in types
        ):
            raise FusionError.explained(
                "A pattern consists of operation classes, tuples of them, Optional(...) and "
                "Repeated(...)",
                where=f"fusion {name!r}",
                received=repr(element),
            )
        optional = isinstance(element, Optional)
        if any(issubclass(t, FusedOperation) and t.is_compound() for t in types):
            out.extend(_expand(_parts(types, optional, name), name))
        else:
            out.append(_Element(types, optional))
    if all(e.optional for e in out):
        raise FusionError.explained(
            "A pattern needs at least one element that is not optional", where=f"fusion {name!r}"
        )
    return tuple(out)


def _parts(
    types: tuple[type[FusibleOperation], ...], optional: bool, name: str
) -> Sequence[PatternElement]:
    """The elements that a compound stands for: fusions see its basic operations, never itself."""
    parts = getattr(types[0], "pattern_parts", None)
    if parts is None or len(types) > 1 or optional:
        raise FusionError.explained(
            "A compound in a pattern stands alone and says what its parts are",
            where=f"fusion {name!r}",
            received=", ".join(t.__name__ for t in types),
            remedy="Write the pattern with basic operations, or give the compound a class "
            "method pattern_parts() that returns theirs",
        )
    return cast("Sequence[PatternElement]", parts())


Part = FusibleOperation | tuple[FusibleOperation, ...] | None


class Match(NamedTuple):
    """A place where a pattern fits: ``ops[start:stop]`` of the list scanned."""

    start: int
    stop: int
    parts: tuple[Part, ...]


class NearMiss(NamedTuple):
    """The beginning of a pattern that fitted somewhere, and what stopped it.

    Attributes:
        start: of the first operation that fitted, by index.
        matched: operations that fitted.
        of: elements of the pattern.
        stopped_by: what stands where the next element is expected.
    """

    start: int
    matched: int
    of: int
    stopped_by: Refusal

    def __str__(self) -> str:
        return f"closest: {self.matched} of {self.of} at op {self.start}; {self.stopped_by}"


def _match(
    pattern: tuple[_Element, ...], ops: Sequence[FusibleOperation], start: int
) -> Match | NearMiss:
    """The match of ``pattern`` at ``ops[start]``; optional elements are present where possible."""
    best: NearMiss | None = None

    def step(element: int, at: int, parts: tuple[Part, ...]) -> Match | None:
        nonlocal best
        matched = at - start
        if element == len(pattern):
            return Match(start, at, parts)
        wanted = pattern[element]
        if wanted.repeated is not None:
            return run_of(wanted, element, at, parts)
        if at < len(ops) and type(ops[at]) in wanted.types:
            found = step(element + 1, at + 1, (*parts, ops[at]))
            if found is not None:
                return found
        elif best is None or matched >= best.matched:
            best = NearMiss(start, matched, len(pattern), _why(wanted, ops, at))
        return step(element + 1, at, (*parts, None)) if wanted.optional else None

    def run_of(wanted: _Element, element: int, at: int, parts: tuple[Part, ...]) -> Match | None:
        nonlocal best
        assert wanted.repeated is not None
        stop = at
        while stop < len(ops) and wanted.repeated.accepts(ops[stop]):
            stop += 1
        if best is None or stop - start >= best.matched:
            best = NearMiss(start, stop - start, len(pattern), _why(wanted, ops, stop))
        for end in range(stop, at + wanted.repeated.at_least - 1, -1):
            found = step(element + 1, end, (*parts, tuple(ops[at:end])))
            if found is not None:
                return found
        return None

    found = step(0, start, ())
    if found is not None:
        return found
    return best or NearMiss(start, 0, len(pattern), _why(pattern[0], ops, start))


def _why(wanted: _Element, ops: Sequence[FusibleOperation], at: int) -> Refusal:
    if at >= len(ops):
        return Refusal("GROUP_SPLIT", f"the run of operations ends where {wanted.name} is expected")
    op = ops[at]
    if wanted.types and isinstance(op, wanted.types):
        return Refusal("SUBCLASS", f"{type(op).__name__} is a subclass of {wanted.name}")
    if isinstance(op, FusedOperation) and _would_take(wanted, op.basic_ops[0]):
        return Refusal("CONFLICT", f"{wanted.name} is already part of {type(op).__name__}")
    return Refusal("LAYOUT", f"{wanted.name} is expected where {type(op).__name__} stands")


def _would_take(wanted: _Element, op: FusibleOperation) -> bool:
    if wanted.repeated is not None:
        return wanted.repeated.accepts(op)
    return isinstance(op, wanted.types)


class Scan(NamedTuple):
    """The result of one fusion on a list of operations.

    Attributes:
        ops: what it made of them.
        matches: what it replaced.
        refusals: where the pattern was found, and why it was not replaced.
        near_misses: where a beginning of the pattern was found, in order. Of those that end at one
            operation the longest counts, so that there are at most as many as operations.
    """

    ops: list[FusibleOperation]
    matches: list[Match]
    refusals: list[tuple[int, Refusal]]
    near_misses: list[NearMiss]

    @property
    def near_miss(self) -> NearMiss | None:
        """The longest one, the first of equals."""
        return longest(self.near_misses)


def longest(near_misses: Iterable[NearMiss]) -> NearMiss | None:
    """The near miss with most operations, the first of equals; None of none."""
    return max(near_misses, key=lambda near: near.matched, default=None)


@dataclass(frozen=True)
class Fusion:
    """A fusion as data: the pattern that it replaces, when it declines, and what it builds.

    Args:
        name: unique name, used in records, configuration and logs.
        stage: ``"forward"``, ``"backward"``, or ``"joint"`` for both passes at once.
        pattern: operation classes in forward order. Exact types only. An element may be a tuple
            of alternatives, ``Optional(...)`` or ``Repeated(...)``. A compound such as ``Linear``
            means its basic operations.
        build: called with the matched operations, one argument per pattern element (None for an
            absent optional one, a tuple for a repeated one), and with ``env=`` if it accepts that
            keyword; returns the FusedOperation.
        refuses: called like ``build`` with ``env=``, and with ``behind=``, the operations that
            follow the match, if it accepts that keyword; returns a :class:`Refusal`, or None.
        requires: requirements on the machine.
        enabled: whether the fusion is on when registered.

    Raises:
        FusionError: the stage is none of these; the pattern holds something else, or nothing that
            has to be there; in planning, if ``refuses`` returns neither None nor a Refusal with a
            known code.

    A ``Fusion`` is itself a fusion function, so that it can be registered beside hand-written ones.
    """

    name: str
    stage: Stage
    pattern: tuple[PatternElement, ...]
    build: Callable[..., FusedOperation]
    refuses: Callable[..., Refusal | None] | None = None
    requires: Requires = ANYWHERE
    enabled: bool = True
    elements: tuple[_Element, ...] = field(init=False, repr=False, compare=False)
    looks_behind: bool = field(init=False, repr=False, compare=False)
    builds_for_env: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise FusionError.explained(
                f"The stage of a fusion is one of {', '.join(STAGES)}",
                where=f"fusion {self.name!r}",
                received=repr(self.stage),
            )
        object.__setattr__(self, "elements", _expand(self.pattern, self.name))
        takes = () if self.refuses is None else inspect.signature(self.refuses).parameters
        object.__setattr__(self, "looks_behind", "behind" in takes)
        takes = inspect.signature(self.build).parameters
        object.__setattr__(self, "builds_for_env", "env" in takes)

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
        veto: Callable[[Match], Refusal | None] | None = None,
    ) -> Scan:
        """Replaces matches greedily from the left.

        Args:
            veto: the engine's own objection to a match, if any; asked before ``refuses``.
        """
        out: list[FusibleOperation] = []
        matches: list[Match] = []
        refusals: list[tuple[int, Refusal]] = []
        near: list[NearMiss] = []
        reasons: dict[Refusal, Refusal] = {}  # one object for equal ones, as records live long
        reached = at = 0
        while at < len(ops):
            found = _match(self.elements, ops, at)
            if isinstance(found, Match):
                no = veto(found) if veto is not None else None
                if no is None:
                    no = self.refusal(found, ops, env)
                if no is None:
                    known = {"env": env} if self.builds_for_env else {}
                    out.append(self.build(*found.parts, **known))
                    matches.append(found)
                    at = found.stop
                    continue
                refusals.append((found.start, no))
            elif found.start + found.matched > max(reached, found.start):
                reached = found.start + found.matched
                why = reasons.setdefault(found.stopped_by, found.stopped_by)
                near.append(found._replace(stopped_by=why))
            out.append(ops[at])
            at += 1
        return Scan(out, matches, refusals, near)

    def places(self, ops: Sequence[FusibleOperation], env: Env) -> list[Match]:
        """Every match in ``ops``, as if each was declined: nothing is built."""
        found: list[Match] = []

        def note(match: Match) -> Refusal:
            found.append(match)
            return Refusal("CONFLICT", "not built here")

        self.scan(ops, env, note)
        return found

    def refusal(self, found: Match, ops: Sequence[FusibleOperation], env: Env) -> Refusal | None:
        """What ``refuses`` says to a match in ``ops``."""
        if self.refuses is None:
            return None
        more = {"behind": ops[found.stop :]} if self.looks_behind else {}
        return self._checked(self.refuses(*found.parts, env=env, **more))

    def _checked(self, no: Any) -> Refusal | None:
        if no is None or (isinstance(no, Refusal) and no.code in REFUSAL_CODES):
            return no
        raise FusionError.explained(
            "refuses() returns None or a Refusal with a known code",
            where=f"fusion {self.name!r}",
            received=repr(no),
            remedy=f"Use one of {', '.join(sorted(REFUSAL_CODES))}",
        )

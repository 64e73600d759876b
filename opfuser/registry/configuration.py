"""The configuration of fusions as data, and what it says about an operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

from ..core.fusion import Stage

__all__ = [
    "EffectiveSetting",
    "FusionConfig",
    "Place",
    "Setting",
    "as_yaml",
    "glob_names",
    "in_order",
    "settings_at",
]


class Setting(NamedTuple):
    """One value of a configuration.

    Attributes:
        fusion: the name of the fusion.
        key: ``"enabled"``, ``"min_numel"`` or ``"dtypes"``.
        value: a bool, a number of elements, or a tuple of dtypes, of which none means any.
        glob: of the modules that it is stated for; empty if for all.
        origin: the file and the line, or what was given the mapping.
    """

    fusion: str
    key: str
    value: Any
    glob: str
    origin: str

    def __str__(self) -> str:
        text = f"{self.key} is {as_yaml(self.value)} ({self.origin})"
        return f"override {self.glob!r}: {text}" if self.glob else text


class EffectiveSetting(NamedTuple):
    """A value that is in force, as :func:`opfuser.registry.effective` lists it.

    Attributes:
        name, stage: of the fusion.
        setting: ``"enabled"``, ``"min_numel"`` or ``"dtypes"``.
        value: as of :class:`Setting`.
        origin: what states the value: ``"default"``, the file and the line, a function, a variable.
        glob: of the modules for which it is in force; empty if for all others.
    """

    name: str
    stage: Stage
    setting: str
    value: Any
    origin: str
    glob: str = ""


@dataclass(frozen=True)
class FusionConfig:
    """A configuration that has been read and checked.

    Attributes:
        source: the file, or what was given the mapping.
        settings: those for all modules, then the overrides; a later one wins.
        orders: of ``order: listed``, the names in the order in which they are to run.
    """

    source: str
    settings: tuple[Setting, ...] = ()
    orders: tuple[tuple[str, ...], ...] = ()

    def __hash__(self) -> int:  # in every key of a plan; tuples do not keep theirs
        return hash((self.source, len(self.settings)))

    @cached_property
    def by_fusion(self) -> dict[str, tuple[Setting, ...]]:
        """The settings of each fusion."""
        out: dict[str, tuple[Setting, ...]] = {}
        for setting in self.settings:
            out[setting.fusion] = (*out.get(setting.fusion, ()), setting)
        return out

    @property
    def names(self) -> set[str]:
        """The fusions that it names."""
        return {setting.fusion for setting in self.settings}.union(*self.orders)

    def globs(self) -> list[str]:
        """Globs of its overrides, in order."""
        return list(dict.fromkeys(s.glob for s in self.settings if s.glob))

    def followed_by(self, other: FusionConfig) -> FusionConfig:
        """One configuration that says what this one and then ``other`` say."""
        later = {(s.fusion, s.key, s.glob) for s in other.settings}
        kept = tuple(
            s
            for s in self.settings
            if not {(s.fusion, s.key, ""), (s.fusion, s.key, s.glob)} & later
        )
        orders = self.orders + tuple(o for o in other.orders if o not in self.orders[-1:])
        return FusionConfig(other.source, kept + other.settings, orders)


class Place(NamedTuple):
    """Where an operation stands.

    Attributes:
        path: below the outermost Sequential that it is called with.
        around: the configurations of the Sequentials that it is in, from the outermost, each with
            the path below that Sequential.
    """

    path: str = ""
    around: tuple[tuple[FusionConfig, str], ...] = ()


def glob_names(glob: str, path: str) -> bool:
    """Whether a glob names the module at ``path``, or one that it is in."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[:n]), glob) for n in range(1, len(parts) + 1))


def settings_at(
    fusion: str, configs: Iterable[FusionConfig], place: Place | None
) -> dict[str, Setting]:
    """What is in force for a fusion at a place, by key; without a place, no override is.

    Args:
        configs: those that hold everywhere, the later ones winning.
    """
    out: dict[str, Setting] = {}
    path = None if place is None else place.path
    around = () if place is None else place.around
    for config, below in (*((config, path) for config in configs), *around):
        for setting in config.by_fusion.get(fusion, ()):
            if not setting.glob or (below is not None and glob_names(setting.glob, below)):
                out[setting.key] = setting
    return out


def in_order(names: Sequence[str], order: Sequence[str]) -> list[str]:
    """``names`` with those in ``order`` sorted as there, in the places that they had together."""
    rank = {name: n for n, name in enumerate(order)}
    moved = iter(sorted((name for name in names if name in rank), key=rank.__getitem__))
    return [next(moved) if name in rank else name for name in names]


def as_yaml(value: Any) -> str:
    """A value as a configuration file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(str(d).removeprefix('torch.') for d in value)}]" if value else "any"
    return str(value)

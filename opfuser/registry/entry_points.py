"""Fusions of other packages, found through the entry-point group ``opfuser.fusions``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, NamedTuple

from ..core.fusion import Fusion
from ..core.op_base import FusedOperation
from ..errors import FusionError

__all__ = ["GROUP", "PluginInfo", "load_all"]

GROUP = "opfuser.fusions"
logger = logging.getLogger("opfuser")


class PluginInfo(NamedTuple):
    """One entry of the group ``opfuser.fusions``, as listed by :func:`opfuser.plugins`.

    Attributes:
        name: of the entry.
        value: what it names, such as ``"package.module:FUSION"``.
        distribution: the name of the installed package; the origin of its fusions.
        version: of the installed package.
        fusions: the names of those that it registered.
        error: why it could not be loaded; empty if it was.
    """

    name: str
    value: str
    distribution: str
    version: str
    fusions: tuple[str, ...]
    error: str


def load_all(
    registering_for: Callable[[str], AbstractContextManager[list[Any]]],
    add: Callable[[Fusion], object],
) -> tuple[PluginInfo, ...]:
    """Loads every entry of the group; one that fails is logged, and registers nothing.

    Args:
        registering_for: a block in which fusions get this origin, and which has the handles of
            those registered in it; on an error it removes them.
        add: registers a fusion.
    """
    out = []
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (_distribution(e), e.name)):
        name, fusions, failed = _distribution(entry), [], ""
        try:
            with registering_for(name) as handles:
                _register(entry.load(), add)
            fusions = [handle.name for handle in handles]
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it stops nothing else
            failed = f"{type(error).__name__}: {error}"
            what = f"{entry.name!r} of {name} ({entry.value})"
            logger.warning("the plug-in %s failed to load: %s", what, failed)
        version = "" if entry.dist is None else entry.dist.version
        out.append(PluginInfo(entry.name, entry.value, name, version, tuple(fusions), failed))
    return tuple(out)


def _distribution(entry: EntryPoint) -> str:
    return entry.value.partition(":")[0] if entry.dist is None else entry.dist.name


def _register(value: Any, add: Callable[[Fusion], object]) -> None:
    """Registers what an entry names: a module and a decorated class did so when imported."""
    if isinstance(value, Fusion):
        add(value)
    elif isinstance(value, ModuleType):
        return
    elif isinstance(value, type) and issubclass(value, FusedOperation):
        if "handle" not in vars(value):
            raise FusionError.explained(
                "A class that is a plug-in is decorated with opfuser.fusion",
                received=f"{value.__module__}:{value.__qualname__}",
            )
    elif inspect.isfunction(value) and _takes_nothing(value):
        value()
    else:
        raise FusionError.explained(
            "A plug-in is a Fusion, a decorated class, a module, or a function without "
            "arguments that registers fusions",
            received=repr(value),
        )


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True

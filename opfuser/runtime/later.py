"""Names of a package that are loaded when they are used for the first time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

# One thread loads at a time: two that import a package and a module of it may wait for each other.
# A process is not forked meanwhile, as its copy of a module would never be loaded to the end.
_loading = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_loading.acquire,
        after_in_parent=_loading.release,
        after_in_child=_loading.release,
    )


def load(place: str) -> Any:
    """What stands at a place, such as ``"opfuser.fused.norm_linear:FUSION"``; loads its module."""
    module, _, name = place.partition(":")
    with _loading:
        found = import_module(module)
    return getattr(found, name) if name else found


def names(
    namespace: dict[str, Any], places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package: the names of its table, and its modules.

    Args:
        namespace: of the package.
        places: the module of the package that has each name.
    """
    package = namespace["__name__"]

    def bind(name: str) -> Any:
        if name in places:
            value = load(f"{package}.{places[name]}:{name}")
        elif name.isidentifier() and name[:2] != "__" and find_spec(f"{package}.{name}"):
            value = load(f"{package}.{name}")
        else:
            return load("opfuser.deprecated:value")(f"{package}.{name}")
        namespace[name] = value
        return value

    def listed() -> list[str]:
        modules = (module.name for module in iter_modules(namespace["__path__"]))
        public = (name for name in modules if name[0] != "_")
        return sorted({*namespace, *namespace["__all__"], *public})

    return bind, listed

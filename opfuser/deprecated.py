"""Public names that have others now: the old ones work for one minor version, and warn.

``NAMES`` is the policy's only list: a rename adds its line, and the tests ask for the line
to go when the version has come in which the old name is removed.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["DeprecatedNameWarning"]


class DeprecatedNameWarning(FutureWarning):
    """A name was used that the next minor version of opfuser removes."""


class Renamed(NamedTuple):
    """What a public name became.

    Attributes:
        to: path of the new name, such as ``"opfuser.apply"``.
        since: the minor version that renamed it, such as ``"0.2"``.
    """

    to: str
    since: str

    @property
    def removed_in(self) -> str:
        """The minor version that has the old name no longer."""
        major, minor = self.since.split(".")
        return f"{major}.{int(minor) + 1}"


NAMES: dict[str, Renamed] = {}


def value(path: str) -> Any:
    """Returns what a deprecated name stands for, and warns; for ``__getattr__`` of its module.

    Args:
        path: module and name, such as ``"opfuser.old"``.

    Raises:
        AttributeError: the name is none of ``NAMES``.
    """
    module, _, name = path.rpartition(".")
    if path not in NAMES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    renamed = NAMES[path]
    text = (
        f"{path} is called {renamed.to} since opfuser {renamed.since}, and goes in "
        f"{renamed.removed_in}. Use {renamed.to}."
    )
    warnings.warn(text, DeprecatedNameWarning, stacklevel=3)  # of whom __getattr__ serves
    module, _, name = renamed.to.rpartition(".")
    return getattr(import_module(module), name)

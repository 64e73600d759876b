"""Public names that have others now, or no effect: they work for one minor version, and warn.

``NAMES`` is the policy's only list: a rename or a removal adds its line, and the tests ask for the
line to go when the version has come in which the name is removed.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["DeprecatedNameWarning"]


class DeprecatedNameWarning(FutureWarning):
    """A name of opfuser was used that the next minor version does not have."""


class Renamed(NamedTuple):
    """What a public name became.

    Attributes:
        to: path of the new name, such as ``"opfuser.apply"``, or of a stand-in.
        since: the minor version that renamed it, such as ``"0.2"``.
        gone: why what it named is gone; None if it has another name. The stand-in changes nothing.
    """

    to: str
    since: str
    gone: str | None = None

    @property
    def removed_in(self) -> str:
        """The minor version that has the old name no longer."""
        major, minor = self.since.split(".")
        return f"{major}.{int(minor) + 1}"


_OVERLAP = "weight gradients on a stream of their own took longer more often than not"
NAMES: dict[str, Renamed] = {
    "opfuser.WgradOverlap": Renamed("opfuser.without_effect.WgradOverlap", "0.1", _OVERLAP),
    "opfuser.overlap_wgrad": Renamed("opfuser.without_effect.overlap_wgrad", "0.1", _OVERLAP),
}
_ASYNC = "products in pieces between their collectives saved 1.6 % of a step"
for _name in ("Overlap", "choose", "names", "register"):
    NAMES[f"opfuser.async_tensor_parallel.{_name}"] = Renamed(
        f"opfuser.without_effect.{_name}", "0.1", _ASYNC
    )


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
    now, remedy = f"is called {renamed.to}", f"Use {renamed.to}"
    if renamed.gone is not None:
        now, remedy = "has no effect", f"Remove its use: {renamed.gone}"
    text = (
        f"{path} {now} since opfuser {renamed.since}, and goes in {renamed.removed_in}. {remedy}."
    )
    warnings.warn(text, DeprecatedNameWarning, stacklevel=3)  # of whom __getattr__ serves
    module, _, name = renamed.to.rpartition(".")
    return getattr(import_module(module), name)

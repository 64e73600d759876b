"""Libraries that calls can be given to where they are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

__all__ = ["imported", "installed"]


@functools.cache
def imported(module: str) -> ModuleType | str:
    """A module, or why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{module} cannot be imported: {reason}"


@functools.cache
def installed(package: str) -> bool:
    """Whether there is a package of that name, which is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec, which programs put there to stand for it
        return True

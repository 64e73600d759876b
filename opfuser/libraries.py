"""Libraries that calls can be given to where they are installed."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

__all__ = ["imported"]


@functools.cache
def imported(module: str) -> ModuleType | str:
    """A module, or why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{module} cannot be imported: {str(error).splitlines()[0]}"

"""Libraries that calls can be given to where they are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib import metadata
from types import ModuleType
from typing import Any

from ..errors import MissingPackageError


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


def required(name: str, by: str, install: str) -> Any:
    """What a feature needs of another library.

    Args:
        name: of it, as ``"module"`` or ``"module:attribute"``.
        by: what needs it.
        install: what pip is to install.

    Raises:
        MissingPackageError: it is not there, or cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        package = module.partition(".")[0]
        there = version(package)
        raise MissingPackageError.explained(
            f"{by} needs {name.replace(':', '.')}",
            received=reason if there is None else f"{package} {there}, {reason}",
            remedy=f"Run pip install '{install}'",
        ) from error


def version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

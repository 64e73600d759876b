"""What surrounds a call: packages, compilers and modes of torch; no operation is known here."""

from __future__ import annotations

_OWN = f"{__name__.partition('.')[0]}."


def is_own(module: object) -> bool:
    """Whether a module is one of the library's, by its name; None is the name of none."""
    return isinstance(module, str) and module.startswith(_OWN)

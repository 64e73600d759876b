"""Names without effect, which ``opfuser.deprecated`` lists: collectives surround their products."""

from __future__ import annotations

from typing import Any

from .deprecated import value


def __getattr__(name: str) -> Any:
    return value(f"{__name__}.{name}")

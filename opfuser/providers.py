"""Libraries that are chosen by name beside torch, which is a name in every table of them."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from .errors import ArgumentError, explain

__all__ = ["Providers"]

P = TypeVar("P", bound=Any)  # has a name


class Providers(dict[str, P]):
    """Providers by name.

    Args:
        kind: what errors call one.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def names(self) -> list[str]:
        """Those that may be chosen."""
        return ["torch", *self]

    def add(self, provider: P, where: str) -> None:
        """Makes a provider known; raises ArgumentError if there is one of its name."""
        if provider.name in self.names():
            raise ArgumentError(
                explain(
                    f"The name of a {self._kind} is its own",
                    where=where,
                    received=repr(provider.name),
                    remedy="Register it once, under another name",
                )
            )
        self[provider.name] = provider

    def find(self, name: str, where: str) -> P | None:
        """The provider of that name, None for torch; raises ArgumentError if there is none."""
        if name == "torch":
            return None
        found = self.get(name)
        if found is not None:
            return found
        close = difflib.get_close_matches(str(name), self.names(), n=1)
        raise ArgumentError(
            explain(
                f"A {self._kind} is one of {', '.join(self.names())}",
                where=where,
                received=repr(name),
                remedy=f"Did you mean {close[0]!r}?" if close else "Register it before",
            )
        )

"""Stand-ins for public names whose mechanisms are gone: calls are accepted and change nothing.

``opfuser.deprecated`` says which names, since when and why. None ever changed a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Overlap", "WgradOverlap", "choose", "names", "overlap_wgrad", "register"]


class WgradOverlap:
    """Switches nothing on, and nothing off."""

    def remove(self) -> None:
        """Does nothing."""

    def __enter__(self) -> WgradOverlap:
        return self

    def __exit__(self, *args: object) -> None:
        pass


def overlap_wgrad(module: Any, stream: Any = None) -> WgradOverlap:
    """Leaves the gradients of weights in ``module`` on the stream of the backward pass."""
    return WgradOverlap()


class Overlap(NamedTuple):
    """Functions that are not called."""

    name: str
    refuses: Callable[..., str | None]
    gather_multiply: Callable[..., Any]
    multiply_scatter: Callable[..., Any]


def choose(name: str, group: Any = None) -> None:
    """Leaves collectives before and behind the products of a group."""


def names() -> list[str]:
    """What a group may choose."""
    return ["torch"]


def register(provider: Overlap) -> None:
    """Forgets the provider."""

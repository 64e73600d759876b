"""Stand-ins for public names whose mechanisms are gone: calls are accepted and change nothing.

``opfuser.deprecated`` says which names, since when and why. None ever changed a value.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WgradOverlap", "overlap_wgrad"]


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

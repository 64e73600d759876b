"""Hooks of transformers, which stay once outputs of modules inside of a model were asked for."""

from __future__ import annotations

import sys
from inspect import getclosurevars
from typing import Any

_FILE = "transformers.utils.output_capturing"


def captured() -> tuple[str, ...]:
    """The names of the outputs that are collected in this call; empty if none are."""
    found = sys.modules.get(_FILE)
    collected = None if found is None else found._active_collector.get()
    return () if not collected else (*collected,)


def is_idle(hook: Any) -> bool:
    """Whether it is such a hook, for outputs that are not collected in this call."""
    if getattr(hook, "__module__", None) != _FILE:
        return False
    return getclosurevars(hook).nonlocals.get("key", "") not in ("", *captured())

"""Any model, computed by sequences of operations: see :func:`opfuser.apply`."""

from __future__ import annotations

from .application import apply, is_computed, is_foreign, report, revert
from .reports import Computed, Inside, Kept, Report

__all__ = [
    "Computed",
    "Inside",
    "Kept",
    "Report",
    "apply",
    "is_computed",
    "is_foreign",
    "report",
    "revert",
]

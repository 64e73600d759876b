"""Any model, computed by sequences of operations: see :func:`opfuser.apply`."""

from __future__ import annotations

from .application import apply, foreign_forward, is_computed, report, revert
from .reports import Computed, Inside, Kept, Report

__all__ = [
    "Computed",
    "Inside",
    "Kept",
    "Report",
    "apply",
    "foreign_forward",
    "is_computed",
    "report",
    "revert",
]

"""Checks for operations and fusions, the user's own included."""

from __future__ import annotations

from .operations import check_op

__all__ = ["check_op"]

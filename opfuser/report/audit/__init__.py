"""What a model could fuse and does not: see :func:`audit`."""

from __future__ import annotations

from .auditing import audit
from .todo import SCHEMA, Estimate, Instance, MissedFusion, Todo

__all__ = ["SCHEMA", "Estimate", "Instance", "MissedFusion", "Todo", "audit"]

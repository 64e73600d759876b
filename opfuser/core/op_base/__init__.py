"""What plans and programs know of operations, which they run and never call."""

from __future__ import annotations

from .basic import BasicOperation
from .fused import FusedOperation
from .fusible import FusibleOperation

__all__ = ["BasicOperation", "FusedOperation", "FusibleOperation"]

"""Base classes of operations, and what a call hands to them."""

from __future__ import annotations

from ..context import (
    Dtypes,
    GradNeeds,
    OperationContext,
    OperationGrads,
    autocast_dtype,
    compute_dtype,
    in_compute_dtype,
    new_context,
)
from .basic import BasicOperation
from .fused import FusedOperation
from .fusible import FusibleOperation

__all__ = [
    "BasicOperation",
    "Dtypes",
    "FusedOperation",
    "FusibleOperation",
    "GradNeeds",
    "OperationContext",
    "OperationGrads",
    "autocast_dtype",
    "compute_dtype",
    "in_compute_dtype",
    "new_context",
]

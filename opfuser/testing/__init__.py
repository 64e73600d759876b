"""Checks for operations and fusions, including your own."""

from __future__ import annotations

from .fusions import check_fusion
from .operations import check_op
from .plans import assert_fused, assert_not_fused
from .saving import UnreadTensorWarning

__all__ = ["UnreadTensorWarning", "assert_fused", "assert_not_fused", "check_fusion", "check_op"]

"""Models of Hugging Face, computed by sequences of operations: see :mod:`opfuser.hf`."""

from __future__ import annotations

from .application import apply, report, revert
from .reports import Kept, Replaced, Report

__all__ = ["Kept", "Replaced", "Report", "apply", "report", "revert"]

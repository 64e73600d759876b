"""Description of the machine on which a figure was measured."""

from __future__ import annotations

from opfuser.report.machine import machine

__all__ = ["machine"]

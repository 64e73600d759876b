"""Models of Hugging Face's transformers, computed by fused operations.

``opfuser.hf.apply(model)`` replaces the ``forward`` of layers, attention, feed-forward blocks,
mixtures of experts and norms, :func:`revert` puts them back, and :func:`report` says what runs as
what.
"""

from __future__ import annotations

from .integrations.hf import Kept, Replaced, Report, apply, report, revert

__all__ = ["Kept", "Replaced", "Report", "apply", "report", "revert"]

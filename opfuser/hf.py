"""Models of Hugging Face's transformers, computed by fused operations.

``opfuser.hf.apply(model)`` replaces the ``forward`` of layers, attention, feed-forward blocks,
mixtures of experts and norms, :func:`revert` puts them back, and :func:`report` says what runs as
what. :func:`register_attention` and :func:`kernel_mapping` give our attention and our layers to
transformers and to the ``kernels`` library by their own doors.
"""

from __future__ import annotations

from .integrations.hf import Kept, Replaced, Report, apply, report, revert
from .integrations.hf.attention_function import register_attention
from .integrations.hf.kernel_layers import kernel_mapping

__all__ = [
    "Kept",
    "Replaced",
    "Report",
    "apply",
    "kernel_mapping",
    "register_attention",
    "report",
    "revert",
]

"""Dtypes that parameters may have."""

from __future__ import annotations

import torch

from ..core.context import COMPUTE_DTYPES
from ..errors import ArgumentError


def check_parameter_dtype(dtype: torch.dtype | None, where: str) -> None:
    """Raises ArgumentError unless ``dtype`` is fp16, bf16, fp32, fp64 or None."""
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise ArgumentError.explained(
            "Parameters must be fp16, bf16, fp32 or fp64", where=where, received=f"dtype={dtype}"
        )

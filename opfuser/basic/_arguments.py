"""Arguments that operations are made with: numbers, and dtypes of parameters."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from ..context import COMPUTE_DTYPES
from ..errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["check_parameter_dtype", "real_number"]


def real_number(value: object, name: str, where: str, remedy: str = "") -> float:
    """``value`` as torch takes it: an int or a float as it is, any other real number as a float.

    Others are fractions, NumPy's scalars, and bool.

    Raises:
        ArgumentTypeError: it is none; the text says so about ``name`` of the operation ``where``.
    """
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, Real):
        return float(value)
    raise ArgumentTypeError(
        explain(
            f"{name} must be a real Python number",
            where=where,
            received="a tensor" if isinstance(value, Tensor) else repr(value),
            remedy=remedy,
        )
    )


def check_parameter_dtype(dtype: torch.dtype | None, where: str) -> None:
    """Raises ArgumentError unless ``dtype`` is fp16, bf16, fp32, fp64 or None."""
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise ArgumentError(
            explain(
                "Parameters must be fp16, bf16, fp32 or fp64",
                where=where,
                received=f"dtype={dtype}",
            )
        )

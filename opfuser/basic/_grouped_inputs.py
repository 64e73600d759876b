"""What an operation on groups of rows is called with: shapes and dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def check_grouped_inputs(
    x: Tensor,
    split_sizes: Tensor,
    scales: Tensor | None,
    *,
    num_groups: int,
    in_features: int,
    where: str,
) -> None:
    """Checks the inputs of a call.

    Args:
        x: main input.
        split_sizes: rows of each group.
        scales: of the bias, for each row, or None.
        num_groups, in_features: those of the operation.
        where: names the operation in the error.

    Raises:
        InputError: one of them is wrong.
    """
    rows = x.numel() // in_features
    if not x.dim() or x.shape[-1] != in_features:
        wrong = f"input of shape {tuple(x.shape)}, expected (..., {in_features})"
    elif split_sizes.shape != (num_groups,) or split_sizes.dtype not in _INTEGERS:
        wrong = (
            f"split sizes of shape {tuple(split_sizes.shape)} and dtype {split_sizes.dtype}, "
            f"expected ({num_groups},) integers"
        )
    elif scales is not None and scales.numel() != rows:
        wrong = f"scales of shape {tuple(scales.shape)}, expected ({rows},)"
    else:
        return
    raise InputError.explained(
        "GroupedLinear takes rows, a split size per group and, with scale_bias, a scale per row",
        where=where,
        received=wrong,
    )

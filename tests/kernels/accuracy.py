"""What results of kernels are held to: at most twice the error of plain torch in the same dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels.launch import INTERPRETED

__all__ = ["assert_accurate", "cut_off", "error"]


def error(got: Tensor, exact: Tensor) -> float:
    """The largest difference."""
    return (got.double() - exact).abs().max().item() if got.numel() else 0.0


def cut_off(got: Tensor) -> bool:
    """Whether the interpreter has cut digits off where a GPU rounds: when it stores bf16."""
    return INTERPRETED and got.dtype == torch.bfloat16


def assert_accurate(
    what: str,
    got: Tensor,
    plain: Tensor,
    exact: Tensor,
    *,
    units: float = 2.0,
    size: float | None = None,
    eps: float | None = None,
    floor: float = 0.0,
) -> None:
    """The error is at most twice that of plain torch, and ``units * eps * size + floor`` more.

    Of two units one is for luck, one for the last rounding.

    Args:
        size: of the terms that are added up; else the largest exact result.
        eps: else that of the dtype of ``got``.
    """
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}"
    if not exact.numel():
        return
    size = exact.abs().max().item() if size is None else size
    eps = torch.finfo(got.dtype).eps if eps is None else eps
    allowed = 2 * error(plain, exact) + units * eps * size + floor
    assert error(got, exact) <= allowed, f"{what}: off by {error(got, exact)} > {allowed}"

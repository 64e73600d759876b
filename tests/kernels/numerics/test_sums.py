"""Partial sums of columns, added up."""

from __future__ import annotations

import pytest
import torch

from opfuser.kernels.column_sums import sum_columns

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    ("counts", "cols", "dtype"),
    [
        ((600,), 4, torch.float32),
        ((600, 270), 37, torch.bfloat16),
        ((1, 0), 513, torch.float16),
        ((0, 3), 37, torch.float32),
        ((600, 270), 1030, torch.float32),
    ],
    ids=str,
)
def test_sums(counts: tuple[int, ...], cols: int, dtype: torch.dtype, device: torch.device) -> None:
    # Sums are whole numbers below 256: exact in all dtypes, and in any order.
    parts = torch.randint(-1, 2, (sum(counts), cols), device=device).float()
    totals = [torch.empty(cols, dtype=dtype, device=device) for _ in counts]
    sum_columns(parts, totals, counts)
    for total, part in zip(totals, parts.split(counts)):
        torch.testing.assert_close(total, part.double().sum(0).to(dtype), rtol=0, atol=0)


def test_rows_in_two_dimensions(device: torch.device) -> None:
    parts = torch.arange(24.0, device=device).view(2, 3, 4)
    totals = [torch.empty(4, device=device) for _ in range(2)]
    sum_columns(parts, totals, (3, 3))
    for total, part in zip(totals, parts):
        assert torch.equal(total, part.sum(0))

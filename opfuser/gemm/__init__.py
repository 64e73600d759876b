"""Every matrix product of a linear operation: forward, dgrad and wgrad, of one matrix or of groups.

What a product does besides multiplying, its epilogue, is an argument: a bias, a factor, a tensor
that is added, memory that the result goes to, and whether it is added to what is there.
"""

from __future__ import annotations

from .grouped import (
    grouped_dgrad,
    grouped_forward,
    grouped_wgrad,
    grouped_wgrad_into,
    has_grouped_gemm,
    reads_groups_on_device,
)
from .low_rank import low_rank_wgrad
from .operands import (
    Adapter,
    LowRank,
    Operand,
    Stacked,
    Weight,
    as_rows,
    joined,
    one_behind_another,
    stacked,
    tensors_of,
    weight_of,
)
from .products import dgrad, dgrad_into, forward, forward_into, wgrad, wgrad_into
from .row_groups import RowGroups, row_groups

__all__ = [
    "Adapter",
    "LowRank",
    "Operand",
    "RowGroups",
    "Stacked",
    "Weight",
    "as_rows",
    "dgrad",
    "dgrad_into",
    "forward",
    "forward_into",
    "grouped_dgrad",
    "grouped_forward",
    "grouped_wgrad",
    "grouped_wgrad_into",
    "has_grouped_gemm",
    "joined",
    "low_rank_wgrad",
    "one_behind_another",
    "reads_groups_on_device",
    "row_groups",
    "stacked",
    "tensors_of",
    "weight_of",
    "wgrad",
    "wgrad_into",
]

"""Concatenation over the ranks of a process group."""

from __future__ import annotations

from ..distributed.collectives import gather, reduce_scatter
from ._collective import CollectiveAlong


class AllGather(CollectiveAlong):
    """Concatenation of the ranks' inputs along a dimension.

    Shapes: x ``(..., N, ...)``, the same on all ranks, y ``(..., ranks · N, ...)``; y has the dtype
    of x. Backward is the reduce-scatter: ``dx_r = Σ_s dy_s[r]``. In a group of one rank, or where
    torch.distributed is not initialised, the identity.

    Args:
        process_group: None is all ranks.
        dim: the dimension, from 0. Other than the first, which collectives take, it costs a copy,
            unless those in front of it are of size 1.

    Raises:
        ArgumentError: ``dim`` is negative.
        InputError: x has no such dimension.
    """

    passes = gather, reduce_scatter

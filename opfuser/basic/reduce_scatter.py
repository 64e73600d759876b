"""Sum over the ranks of a process group, of which each keeps a slice."""

from __future__ import annotations

from ..distributed.collectives import gather, reduce_scatter
from ._collective import CollectiveAlong


class ReduceScatter(CollectiveAlong):
    """This rank's slice, along a dimension, of the sum of the ranks' inputs.

    Shapes: x ``(..., ranks · N, ...)``, y ``(..., N, ...)``; ``y_r = Σ_s x_s[r]``, in the dtype of
    x. Backward gathers the ranks' gradients. In a group of one rank, or where torch.distributed is
    not initialised, the identity.

    Args:
        process_group: None is all ranks.
        dim: the dimension, from 0. Other than the first, which collectives take, it costs a copy,
            unless those in front of it are of size 1.

    Raises:
        ArgumentError: ``dim`` is negative.
        InputError: that dimension of x is no multiple of the group size.
    """

    passes = reduce_scatter, gather

"""Tensor and sequence parallelism: how a linear transformation is sharded, and the collectives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..async_tensor_parallel import Overlap, chosen
from ..errors import ArgumentError, InputError, NotSupportedError, explain

__all__ = [
    "GroupRef",
    "LinearSharding",
    "all_reduce",
    "gather_first_dim",
    "gather_input",
    "gather_output_grad",
    "group_size",
    "overlap_of",
    "reduce_input_grad",
    "reduce_output",
    "reduce_scatter_first_dim",
    "refuse_reference",
    "shard_linear",
]


def _collective(name: str, before_2_13: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, before_2_13, None)


_all_gather = _collective("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")


class GroupRef(NamedTuple):
    """A process group, None for all ranks. Groups cannot be copied: copies of a module share it."""

    group: dist.ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRef:
        return self


class LinearSharding(NamedTuple):
    """How a linear transformation is distributed, with its sizes on this rank."""

    mode: str | None
    group: dist.ProcessGroup | None
    ranks: int
    sequence_parallel: bool
    local_in_features: int
    local_out_features: int

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearSharding:
        return self  # as GroupRef

    @property
    def gathers_input(self) -> bool:
        """Whether the input is sliced along its first dimension."""
        return self.sequence_parallel and self.mode == "column"

    @property
    def scatters_output(self) -> bool:
        """Whether the output is sliced along its first dimension."""
        return self.sequence_parallel and self.mode == "row"


def shard_linear(
    in_features: int,
    out_features: int,
    *,
    mode: str | None,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    where: str,
) -> LinearSharding:
    """Checks the arguments of a linear operation; a group of one rank shards nothing.

    Raises:
        ArgumentError: unknown mode, sequence parallelism without a mode, sizes that are negative
            or not divisible by the group size.
    """
    if mode not in (None, "column", "row"):
        raise ArgumentError(
            explain(
                "tensor_parallel_mode must be None, 'column' or 'row'",
                where=where,
                received=repr(mode),
            )
        )
    if sequence_parallel and mode is None:
        raise ArgumentError(
            explain(
                "sequence_parallel needs a tensor_parallel_mode",
                where=where,
                received="sequence_parallel=True, tensor_parallel_mode=None",
                remedy="Pass tensor_parallel_mode='column' or 'row'",
            )
        )
    if in_features < 0 or out_features < 0:
        raise ArgumentError(
            explain(
                "in_features and out_features must not be negative",
                where=where,
                received=f"in_features={in_features}, out_features={out_features}",
            )
        )
    ranks = 1 if mode is None else group_size(group)
    if ranks == 1:
        return LinearSharding(None, None, 1, False, in_features, out_features)
    name, size = ("out", out_features) if mode == "column" else ("in", in_features)
    if size % ranks:
        raise ArgumentError(
            explain(
                f"{name}_features must be a multiple of the tensor-parallel size in {mode} mode",
                where=where,
                received=f"{name}_features={size}, {ranks} ranks",
            )
        )
    if mode == "column":
        out_features //= ranks
    else:
        in_features //= ranks
    return LinearSharding(mode, group, ranks, sequence_parallel, in_features, out_features)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in ``group`` (None: all); 1 where torch.distributed is not initialised."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


def refuse_reference(group: dist.ProcessGroup | None, where: str) -> None:
    """Raises NotSupportedError if the operation spans several ranks: a reference runs on one."""
    if group_size(group) > 1:
        raise NotSupportedError(
            explain(
                "The reference of an operation covers one rank",
                where=where,
                received=f"a group of {group_size(group)} ranks",
                remedy="Compare with the operation unsharded",
            )
        )


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, *, reuse: bool = False) -> Tensor:
    """Sum of ``x`` over the ranks; into ``x`` itself if that is ours alone (``reuse``)."""
    out = x if reuse else x.clone(memory_format=torch.contiguous_format)
    out = out.contiguous()
    if out.numel():
        dist.all_reduce(out, group=group)
    return out


def gather_first_dim(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenation of the ranks' ``x``, which have one shape, along the first dimension.

    Raises:
        InputError: ``x`` has no dimensions.
    """
    if not x.dim():
        raise InputError(
            explain(
                "Gathering along the first dimension needs a tensor that has one",
                received="a tensor without dimensions",
            )
        )
    out = x.new_empty((x.shape[0] * group_size(group), *x.shape[1:]))
    if x.numel():
        _all_gather(out, x.contiguous(), group=group)
    return out


def reduce_scatter_first_dim(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's slice, along the first dimension, of the sum of ``x`` over the ranks.

    Raises:
        InputError: the first dimension is no multiple of the group size.
    """
    ranks = group_size(group)
    if not x.dim() or x.shape[0] % ranks:
        raise InputError(
            explain(
                "The first dimension of a tensor to scatter must be a multiple of the group size",
                received=f"shape {tuple(x.shape)}, {ranks} ranks",
                remedy="Pad the rows, or run without sequence parallelism",
            )
        )
    out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    if x.numel():
        _reduce_scatter(out, x.contiguous(), group=group)
    return out


def overlap_of(x: Tensor, sharding: LinearSharding, *, scatters: bool) -> Overlap | None:
    """Who computes the product of ``x`` with its collective, if its group has chosen so.

    Args:
        x: of this rank, input in forward, gradient of the output in backward.
        sharding: of the operation; only with sequence parallelism there is a choice.
        scatters: whether the rows of the product are scattered, and so must be a multiple of the
            group size: where they are not, the scatter says so.
    """
    if not sharding.sequence_parallel or (scatters and x.dim() and x.shape[0] % sharding.ranks):
        return None
    return chosen(x, sharding.group)


def gather_input(x: Tensor, sharding: LinearSharding) -> Tensor:
    """The input as the forward GEMM, and that of the weight's gradient, take it."""
    return gather_first_dim(x, sharding.group) if sharding.gathers_input else x


def reduce_output(y: Tensor, sharding: LinearSharding) -> Tensor:
    """The output, from what the forward GEMM returns."""
    if sharding.scatters_output:
        return reduce_scatter_first_dim(y, sharding.group)
    return all_reduce(y, sharding.group, reuse=True) if sharding.mode == "row" else y


def gather_output_grad(dy: Tensor, sharding: LinearSharding) -> Tensor:
    """The gradient of the output as the two GEMMs of backward take it."""
    return gather_first_dim(dy, sharding.group) if sharding.scatters_output else dy


def reduce_input_grad(dx: Tensor, sharding: LinearSharding) -> Tensor:
    """The gradient of the input, from what its GEMM returns."""
    if sharding.gathers_input:
        return reduce_scatter_first_dim(dx, sharding.group)
    return all_reduce(dx, sharding.group, reuse=True) if sharding.mode == "column" else dx

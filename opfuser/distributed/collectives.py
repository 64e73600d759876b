"""Tensor and sequence parallelism: how a linear transformation is sharded, and the collectives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, InputError, NotSupportedError
from ..runtime.recording import assume, seen_whole


def _collective(name: str, before_2_13: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, before_2_13, None)


_all_gather = _collective("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")


@seen_whole(writes=0)
def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Into ``x``, which is contiguous, its sum over the ranks."""
    dist.all_reduce(x, group=group)
    return x


@seen_whole(writes=0)
def gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Into ``out`` the ranks' ``x``, one behind another; both are contiguous."""
    _all_gather(out, x, group=group)
    return out


@seen_whole(writes=0)
def reduce_scatter_into(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Into ``out`` this rank's rows of the sum of ``x``; both are contiguous."""
    _reduce_scatter(out, x, group=group)
    return out


class GroupRef(NamedTuple):
    """A process group, None for all ranks. Groups cannot be copied: copies of a module share it."""

    group: dist.ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRef:
        return self


class VocabularySlice(NamedTuple):
    """The classes of this rank, of those that a group of ranks holds together.

    Attributes:
        group: the ranks; None is all.
        ranks: their number.
        classes: of all ranks together.
        start: the first one of this rank.
        rows: classes of this rank; no other has more than ``largest``.
    """

    group: dist.ProcessGroup | None
    ranks: int
    classes: int
    start: int
    rows: int

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularySlice:
        return self  # as GroupRef

    @property
    def largest(self) -> int:
        """Classes of the rank that has most of them."""
        return -(-self.classes // self.ranks)


def slice_vocabulary(
    classes: int, group: dist.ProcessGroup | None, where: str
) -> VocabularySlice | None:
    """This rank's slice of so many classes, cut as by ``torch.chunk``; None in a group of one rank.

    That is how ``torch.distributed.tensor.Shard`` cuts: the last slices may be smaller.

    Raises:
        ArgumentError: a rank would have none.
    """
    ranks = group_size(group)
    if ranks == 1:
        return None
    largest = -(-classes // ranks)
    if largest * (ranks - 1) >= classes:
        raise ArgumentError.explained(
            "Every rank must have a slice of the vocabulary, cut as by torch.chunk",
            where=where,
            received=f"{classes} classes, {ranks} ranks",
            remedy="Pad the vocabulary to a multiple of the ranks, or use fewer of them",
        )
    start = largest * dist.get_rank(group)
    return VocabularySlice(group, ranks, classes, start, min(largest, classes - start))


class LinearSharding(NamedTuple):
    """How a linear transformation is distributed, with its sizes on this rank."""

    mode: str | None
    group: dist.ProcessGroup | None
    ranks: int
    sequence_parallel: bool
    local_in_features: int
    local_out_features: int
    sequence_dim: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearSharding:
        return self  # as GroupRef

    @property
    def gathers_input(self) -> bool:
        """Whether the input is sliced along its dimension ``sequence_dim``."""
        return self.sequence_parallel and self.mode == "column"

    @property
    def scatters_output(self) -> bool:
        """Whether the output is sliced along its dimension ``sequence_dim``."""
        return self.sequence_parallel and self.mode == "row"


def shard_linear(
    in_features: int,
    out_features: int,
    *,
    mode: str | None,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    sequence_dim: int = 0,
    where: str,
) -> LinearSharding:
    """Checks the arguments of a linear operation; a group of one rank shards nothing.

    Raises:
        ArgumentError: unknown mode, sequence parallelism without a mode or along a dimension that
            is negative, sizes that are negative or not divisible by the group size.
    """
    check_sequence_dim(sequence_dim, where)
    if mode not in (None, "column", "row", "vocabulary"):
        raise ArgumentError.explained(
            "tensor_parallel_mode must be None, 'column', 'row' or 'vocabulary'",
            where=where,
            received=repr(mode),
        )
    if sequence_parallel and mode is None:
        raise ArgumentError.explained(
            "sequence_parallel needs a tensor_parallel_mode",
            where=where,
            received="sequence_parallel=True, tensor_parallel_mode=None",
            remedy="Pass tensor_parallel_mode='column' or 'row'",
        )
    if in_features < 0 or out_features < 0:
        raise ArgumentError.explained(
            "in_features and out_features must not be negative",
            where=where,
            received=f"in_features={in_features}, out_features={out_features}",
        )
    ranks = 1 if mode is None else group_size(group)
    if ranks == 1:
        return LinearSharding(None, None, 1, False, in_features, out_features)
    if mode == "vocabulary":
        own = slice_vocabulary(out_features, group, where)
        assert own is not None
        sizes = in_features, own.rows
        return LinearSharding("column", group, ranks, sequence_parallel, *sizes, sequence_dim)
    name, size = ("out", out_features) if mode == "column" else ("in", in_features)
    if size % ranks:
        raise ArgumentError.explained(
            f"{name}_features must be a multiple of the tensor-parallel size in {mode} mode",
            where=where,
            received=f"{name}_features={size}, {ranks} ranks",
        )
    if mode == "column":
        out_features //= ranks
    else:
        in_features //= ranks
    sizes = in_features, out_features
    return LinearSharding(mode, group, ranks, sequence_parallel, *sizes, sequence_dim)


def check_sequence_dim(dim: int, where: str, name: str = "sequence_dim") -> None:
    """Raises ArgumentError for a dimension that is counted from the end: there are the features."""
    if dim < 0:
        raise ArgumentError.explained(
            f"{name} must not be negative",
            where=where,
            received=f"{name}={dim}",
            remedy="Count the dimensions from the first one",
        )


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in ``group`` (None: all); 1 where torch.distributed is not initialised."""
    if group is None:
        assume(_number_of_ranks)
        return _number_of_ranks()
    return dist.get_world_size(group)


def _number_of_ranks() -> int:
    initialised = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if initialised else 1


def refuse_reference(group: dist.ProcessGroup | None, where: str) -> None:
    """Raises NotSupportedError if the operation spans several ranks: a reference runs on one."""
    if group_size(group) > 1:
        raise NotSupportedError.explained(
            "The reference of an operation covers one rank",
            where=where,
            received=f"a group of {group_size(group)} ranks",
            remedy="Compare with the operation unsharded",
        )


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, *, reuse: bool = False) -> Tensor:
    """Sum of ``x`` over the ranks; into ``x`` itself if that is ours alone (``reuse``)."""
    out = x if reuse else x.clone(memory_format=torch.contiguous_format)
    out = out.contiguous()
    if out.numel():
        out = sum_over_ranks(out, group)
    return out


def gather(x: Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> Tensor:
    """Concatenation of the ranks' ``x``, which have one shape, along a dimension.

    Collectives concatenate along the first dimension. Another one costs a copy, unless those in
    front of it are of size 1.

    Raises:
        InputError: ``x`` has no such dimension.
    """
    if x.dim() <= dim:
        raise InputError.explained(
            f"Gathering along {_named(dim)} needs a tensor that has one",
            received=f"shape {tuple(x.shape)}",
        )
    ranks, shape = group_size(group), x.shape
    out = x.new_empty((ranks * shape[0], *shape[1:]))
    if x.numel():
        out = gather_into(out, x.contiguous(), group)
    if not dim:
        return out
    whole = (*shape[:dim], ranks * shape[dim], *shape[dim + 1 :])
    return out.view(ranks, *shape).movedim(0, dim).reshape(whole)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> Tensor:
    """This rank's slice, along a dimension, of the sum of ``x`` over the ranks.

    Raises:
        InputError: the size along the dimension is no multiple of the group size.
    """
    ranks = group_size(group)
    if x.dim() <= dim or x.shape[dim] % ranks:
        raise InputError.explained(
            f"{_named(dim).capitalize()} of a tensor to scatter must be a multiple of the "
            "group size",
            received=f"shape {tuple(x.shape)}, {ranks} ranks",
            remedy="Pad it, or run without sequence parallelism",
        )
    if dim:
        x = x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0).flatten(0, 1)
    out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    if x.numel():
        out = reduce_scatter_into(out, x.contiguous(), group)
    return out


def _named(dim: int) -> str:
    return f"dimension {dim}" if dim else "the first dimension"


def gather_input(x: Tensor, sharding: LinearSharding) -> Tensor:
    """The input as the forward GEMM, and that of the weight's gradient, take it."""
    return gather(x, sharding.group, sharding.sequence_dim) if sharding.gathers_input else x


def reduce_output(y: Tensor, sharding: LinearSharding) -> Tensor:
    """The output, from what the forward GEMM returns."""
    if sharding.scatters_output:
        return reduce_scatter(y, sharding.group, sharding.sequence_dim)
    return all_reduce(y, sharding.group, reuse=True) if sharding.mode == "row" else y


def gather_output_grad(dy: Tensor, sharding: LinearSharding) -> Tensor:
    """The gradient of the output as the two GEMMs of backward take it."""
    return gather(dy, sharding.group, sharding.sequence_dim) if sharding.scatters_output else dy


def reduce_input_grad(dx: Tensor, sharding: LinearSharding) -> Tensor:
    """The gradient of the input, from what its GEMM returns."""
    if sharding.gathers_input:
        return reduce_scatter(dx, sharding.group, sharding.sequence_dim)
    return all_reduce(dx, sharding.group, reuse=True) if sharding.mode == "column" else dx

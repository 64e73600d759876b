"""A model with sharded parameters beside the same model on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from opfuser.models.sharding import shard_layers

__all__ = [
    "Batch",
    "all_ranks",
    "assert_same",
    "batches",
    "gradients_of_one",
    "new_checkpoint",
    "read_checkpoint",
    "shard",
    "twins",
    "whole",
    "write_checkpoint",
]

Batch = tuple[Tensor, Tensor]
"""Tokens and targets of all ranks; the first dimension is theirs."""


def all_ranks() -> DeviceMesh:
    """All ranks on their default devices; torch's own default is a GPU wherever there is one."""
    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))


def shard(model: Any, **arguments: Any) -> Any:
    """``shard_layers`` over all ranks."""
    return shard_layers(model, **{"mesh": all_ranks(), **arguments})


def twins(
    make: Callable[[], nn.Module], sharded: Callable[[nn.Module], Any]
) -> tuple[nn.Module, nn.Module]:
    """The model that one rank would have, and an equal one that is sharded."""
    torch.manual_seed(1)
    one, ours = make(), make()
    ours.load_state_dict(one.state_dict())
    sharded(ours)
    return one, ours


def batches(ranks: int, sizes: Sequence[int] = (2,), vocab: int = 29) -> list[Batch]:
    """A micro-batch for each of ``sizes``, its sequences on each rank."""
    how = {"generator": torch.Generator("cpu").manual_seed(2), "device": "cpu"}
    drawn = [torch.randint(vocab, (2, ranks, n, 5), **how) for n in sizes]
    return [(tokens, targets) for tokens, targets in map(_placed, drawn)]


def _placed(value: Tensor) -> Tensor:
    return value.to(torch.get_default_device())


def gradients_of_one(model: nn.Module, parts: Iterable[Batch]) -> list[list[float]]:
    """Backward of the mean over ranks of the sum of losses; the losses of each rank."""
    losses = []
    for tokens, targets in parts:
        own = [model(x, t) for x, t in zip(tokens, targets)]
        (sum(own) / len(own)).backward()
        losses.append([loss.item() for loss in own])
    return losses


def whole(value: Tensor | None) -> Tensor:
    """All shards of a tensor."""
    assert isinstance(value, DTensor)
    return value.full_tensor()


def assert_same(ours: nn.Module, one: nn.Module, bound: float = 1e-11, grads: bool = True) -> None:
    """Parameters and, if asked for, their gradients are those of one rank."""
    for (name, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
        mine, exact = (p.grad, q.grad) if grads else (p, q)
        torch.testing.assert_close(whole(mine), exact, rtol=100 * bound, atol=bound, msg=name)


def new_checkpoint() -> str:
    """A folder for a checkpoint, the same on all ranks."""
    folder = [TemporaryDirectory().name if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return folder[0]


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


def write_checkpoint(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.save(_states(model, optimizer), checkpoint_id=folder)


def read_checkpoint(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states = _states(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    given = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
    set_state_dict(model, optimizer, **given)

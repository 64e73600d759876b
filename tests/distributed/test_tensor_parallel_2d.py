"""``parallelize`` over one dimension of a mesh, and ``shard_layers`` over the other: four ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from opfuser import Sequential
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.models.parallel import parallelize
from opfuser.models.sharding import shard_layers
from tests.distributed.ranks import Checks, Outcomes, assert_passed
from tests.distributed.sharded import new_checkpoint, read_checkpoint, write_checkpoint
from tests.distributed.test_tensor_parallel import same, whole

pytestmark = pytest.mark.distributed

RANKS = 4
CHECKS = check = Checks()
CONFIG = DecoderConfig(31, 16, 2, 4, num_kv_heads=2, ffn_dim=24, qk_norm=True, dtype=torch.float64)


def made(model: Sequential, **how: Any) -> tuple[Sequential, torch.optim.Optimizer, int]:
    """The model on two by two ranks, its optimizer, and which part of the batch is this rank's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_layers(parallelize(model, mesh["tp"]), mesh=mesh["dp"], **how)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), mesh["dp"].get_local_rank()


def step(model: Sequential, optimizer: torch.optim.Optimizer, batch: Any) -> tuple[Any, Any]:
    loss = model(*batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


@check
def losses_of_one_process(rank: int, ranks: int) -> None:
    for reshard in (True, False):
        torch.manual_seed(1)
        exact = decoder_lm(CONFIG)
        ours, optimizer, part = made(copy.deepcopy(exact), reshard_after_forward=reshard)
        assert all(isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in ours.parameters())
        reference = torch.optim.AdamW(exact.parameters(), lr=1e-2)
        for _ in range(3):
            batch = torch.randint(31, (2, 4, 8))
            loss, norm = step(exact, reference, batch)
            mine, own_norm = step(ours, optimizer, batch[:, 2 * part : 2 * part + 2])
            dist.all_reduce(mine)
            torch.testing.assert_close(mine / ranks, loss, rtol=1e-10, atol=0)
            torch.testing.assert_close(own_norm.full_tensor(), norm, rtol=1e-9, atol=0)
        for name, p in whole(ours).items():
            same(p, exact.get_parameter(name).detach(), name)


@check
def checkpoints(rank: int, ranks: int) -> None:
    """Written by two by two ranks, read by four for tensor parallelism of one."""
    folder = new_checkpoint()
    torch.manual_seed(1)
    ours, optimizer, part = made(decoder_lm(CONFIG))
    batch = torch.randint(31, (2, 4, 8))
    step(ours, optimizer, batch[:, 2 * part : 2 * part + 2])
    write_checkpoint(folder, ours, optimizer)
    loss, _ = step(ours, optimizer, batch[:, 2 * part : 2 * part + 2])
    dist.all_reduce(loss)
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))["tp"]
    other = parallelize(decoder_lm(CONFIG), alone)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    read_checkpoint(folder, other, optimizer)
    mine, _ = step(other, optimizer, batch)
    torch.testing.assert_close(loss / ranks, mine, rtol=1e-10, atol=0)


@check
def policy_of_precision(rank: int, ranks: int) -> None:
    """Stored in fp32, and computed in bf16."""
    torch.manual_seed(1)
    config = DecoderConfig(31, 16, 2, 4, num_kv_heads=2)
    exact = decoder_lm(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, optimizer, part = made(copy.deepcopy(exact), mp_policy=policy)
    batch = torch.randint(31, (2, 4, 8))
    mine, _ = step(ours, optimizer, batch[:, 2 * part : 2 * part + 2])
    dist.all_reduce(mine)
    torch.testing.assert_close(mine.float() / ranks, exact(*batch).detach(), rtol=1e-3, atol=0)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", CHECKS)
def test_two_dimensions(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)

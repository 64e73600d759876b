"""Expert and tensor parallelism with ``shard_layers``, and checkpoints: four ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from opfuser import Sequential
from opfuser.errors import ArgumentError, NotSupportedError
from opfuser.models import DecoderConfig, MoEConfig, decoder_lm
from opfuser.models.parallel import parallelize
from opfuser.models.sharding import shard_layers
from tests.distributed.ranks import Checks, Outcomes, assert_passed
from tests.distributed.sharded import new_checkpoint, read_checkpoint, write_checkpoint
from tests.distributed.test_tensor_parallel import whole as unmerged

pytestmark = pytest.mark.distributed

RANKS = 4
CHECKS = check = Checks()
MOE = MoEConfig(16, 10, 8, 3, shared_ffn_dim=6, init_std=0.3)
CONFIG = DecoderConfig(31, 16, 2, 4, num_kv_heads=4, dtype=torch.float64, moe=MOE)
WITH_LOSS = replace(CONFIG, router_aux_loss_coef=0.1)
WITHOUT_EXPERTS = DecoderConfig(
    31, 16, 2, 4, num_kv_heads=2, ffn_dim=24, qk_norm=True, dtype=torch.float64
)
WAYS = "two by two", "four", "four by tensors", "two by two by tensors"


def made(model: Sequential, way: str, **how: Any) -> Sequential:
    """``model``, distributed in one of the ways."""
    everyone = init_device_mesh("cpu", (RANKS,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    if way == "two by two":
        parallelize(model, expert_parallel=grid["ep"])
        return shard_layers(model, expert_mesh=grid["dp"], mesh=everyone, **how)
    if way == "four":
        return shard_layers(parallelize(model, expert_parallel=everyone), mesh=everyone, **how)
    if way == "four by tensors":
        return parallelize(model, everyone, expert_parallel=everyone)
    parallelize(model, grid["ep"], expert_parallel=grid["ep"])
    return shard_layers(model, mesh=grid["dp"], **how)


def part(batch: Tensor, way: str) -> Tensor:
    """This rank's sequences of (2, 4, 8)."""
    rank = dist.get_rank()
    if way == "four by tensors":
        return batch
    return batch.chunk(2, 1)[rank // 2] if "tensors" in way else batch.chunk(RANKS, 1)[rank]


def exact_loss(one: Sequential, batch: Tensor, way: str) -> Tensor:
    """The mean over ranks, each with the routers' loss of its own tokens."""
    parts = {"four by tensors": 1, "two by two by tensors": 2}.get(way, RANKS)
    losses = [one(*own) for own in batch.chunk(parts, 1)]
    return sum(losses, torch.zeros(())) / parts


def mean(loss: Tensor) -> Tensor:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / RANKS


def whole(model: Sequential) -> dict[str, Tensor]:
    """Parameters as one process has them: the packed ones of tensor parallelism are left out."""
    return {n: p.full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}


@check
def steps_of_one_process(rank: int, ranks: int) -> None:
    for way in WAYS:
        torch.manual_seed(1)
        one = decoder_lm(CONFIG if "tensors" in way else WITH_LOSS)
        ours = made(copy.deepcopy(one), way)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, ours)]
        for _ in range(3):
            batch = torch.randint(31, (2, 4, 8))
            loss, mine = exact_loss(one, batch, way), ours(*part(batch, way))
            loss.backward()
            mine.backward()
            torch.testing.assert_close(mean(mine), loss.detach(), rtol=1e-10, atol=0, msg=way)
            for name, p in ours.named_parameters():
                if name in dict(one.named_parameters()):
                    assert p.grad is not None
                    same(p.grad.full_tensor(), one.get_parameter(name).grad, f"{way}: {name}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        exact = dict(one.named_parameters())
        found = whole(ours)
        assert {"layers.1.mlp.2.gate_up.weight", "layers.0.mlp.2.router.weight"} <= {*found}
        for name in {*found} & {*exact}:
            same(found[name], exact[name].detach(), f"{way}: {name}")


def same(ours: Tensor, exact: Tensor | None, what: str) -> None:
    assert exact is not None
    bound = 1e-9 * exact.abs().max().item()
    torch.testing.assert_close(ours, exact, rtol=0, atol=bound, msg=what)


@check
def checkpointing_of_activations(rank: int, ranks: int) -> None:
    """The exchange is repeated in backward, on all ranks alike."""
    torch.manual_seed(1)
    one = decoder_lm(CONFIG)
    ours = copy.deepcopy(one)
    everyone = init_device_mesh("cpu", (ranks,))
    parallelize(ours, expert_parallel=everyone)
    for n, layer in enumerate(ours.layers):
        ours.layers[n] = checkpoint_wrapper(layer)
    batch = torch.randint(31, (2, 4, 8))
    exact_loss(one, batch, "four").backward()
    ours(*part(batch, "four")).backward()
    for (name, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
        assert p.grad is not None
        grad = p.grad.full_tensor() if isinstance(p, DTensor) else mean(p.grad)
        same(grad, q.grad, name)


@check
def checkpoints(rank: int, ranks: int) -> None:
    """Written by two by two ranks, read by four, and by four that hold all experts each."""
    folder = new_checkpoint()
    torch.manual_seed(1)
    ours = made(decoder_lm(WITH_LOSS), "two by two")
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    batches = torch.randint(31, (2, 2, 4, 8))
    ours(*part(batches[0], "two by two")).backward()
    optimizer.step()
    optimizer.zero_grad()
    write_checkpoint(folder, ours, optimizer)
    torch.manual_seed(2)
    other = made(decoder_lm(WITH_LOSS), "four")
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    read_checkpoint(folder, other, other_optimizer)
    one = decoder_lm(WITH_LOSS)
    plain = {"model": one.state_dict()}
    dcp.load(plain, checkpoint_id=folder)
    one.load_state_dict(plain["model"])
    for model in (ours, other):
        for name, p in whole(model).items():
            assert torch.equal(p, one.get_parameter(name)), name
    for model, step in ((ours, optimizer), (other, other_optimizer)):
        model(*part(batches[1], "four")).backward()
        step.step()
    found = whole(other)
    for name, p in whole(ours).items():
        same(found[name], p, name)


@check
def whole_state_dicts(rank: int, ranks: int) -> None:
    """Those of one process load, and those that are gathered load there."""
    torch.manual_seed(1)
    one, options = decoder_lm(CONFIG), StateDictOptions(full_state_dict=True)
    state = {name: value.clone() for name, value in one.state_dict().items()}
    for way in ("two by two", "four"):
        ours = made(decoder_lm(CONFIG), way)
        set_model_state_dict(ours, dict(state), options=options)  # torch replaces values
        found = get_model_state_dict(ours, options=options)
        assert {*found} == {*state}
        for name, value in state.items():
            assert torch.equal(found[name], value), name


@check
def norms_of_gradients(rank: int, ranks: int) -> None:
    """``clip_grad_norm_`` of parameters over one mesh; other meshes one by one."""
    torch.manual_seed(1)
    one = decoder_lm(WITH_LOSS)
    batch = torch.randint(31, (2, 4, 8))
    exact_loss(one, batch, "four").backward()
    exact = nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None])
    for way in ("two by two", "four"):
        ours = made(copy.deepcopy(one), way)
        ours(*part(batch, way)).backward()
        by_mesh: dict[Any, list[Tensor]] = {}
        for p in ours.parameters():
            assert isinstance(p, DTensor)
            by_mesh.setdefault(p.device_mesh, []).append(p.grad)
        norms = [nn.utils.get_total_norm(grads).full_tensor() for grads in by_mesh.values()]
        same(torch.stack(norms).norm(), exact, way)


@check
def meshes_that_do_not_go_together(rank: int, ranks: int) -> None:
    everyone = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    ours = parallelize(decoder_lm(CONFIG), expert_parallel=grid["ep"])
    with pytest.raises(ArgumentError, match="experts over 2 ranks, expert_mesh of 1, mesh of 4"):
        shard_layers(ours, mesh=everyone)
    with pytest.raises(ArgumentError, match="experts over no ranks, expert_mesh of 2, mesh of 4"):
        shard_layers(decoder_lm(CONFIG), mesh=everyone, expert_mesh=grid["dp"])
    with pytest.raises(ArgumentError, match="its experts over the same or alone"):
        parallelize(decoder_lm(CONFIG), grid["dp"], expert_parallel=grid["ep"])
    with pytest.raises(ArgumentError, match=r"one dimension.* 2 dimensions"):
        parallelize(decoder_lm(CONFIG), expert_parallel=grid)
    with pytest.raises(NotSupportedError, match=r"same tokens.*sequence_parallel=True"):
        parallelize(decoder_lm(CONFIG), everyone, expert_parallel=everyone, sequence_parallel=False)
    with pytest.raises(NotSupportedError, match=r"TopKRouter whose losses are those of a part"):
        parallelize(decoder_lm(WITH_LOSS), everyone, expert_parallel=everyone)


def in_two_dimensions(
    model: Sequential, **how: Any
) -> tuple[Sequential, torch.optim.Optimizer, int]:
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
        exact = decoder_lm(WITHOUT_EXPERTS)
        ours, optimizer, part = in_two_dimensions(
            copy.deepcopy(exact), reshard_after_forward=reshard
        )
        assert all(isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in ours.parameters())
        reference = torch.optim.AdamW(exact.parameters(), lr=1e-2)
        for _ in range(3):
            batch = torch.randint(31, (2, 4, 8))
            loss, norm = step(exact, reference, batch)
            mine, own_norm = step(ours, optimizer, batch[:, 2 * part : 2 * part + 2])
            dist.all_reduce(mine)
            torch.testing.assert_close(mine / ranks, loss, rtol=1e-10, atol=0)
            torch.testing.assert_close(own_norm.full_tensor(), norm, rtol=1e-9, atol=0)
        for name, p in unmerged(ours).items():
            same(p, exact.get_parameter(name).detach(), name)


@check
def checkpoints_of_two_dimensions(rank: int, ranks: int) -> None:
    """Written by two by two ranks, read by four for tensor parallelism of one."""
    folder = new_checkpoint()
    torch.manual_seed(1)
    ours, optimizer, part = in_two_dimensions(decoder_lm(WITHOUT_EXPERTS))
    batch = torch.randint(31, (2, 4, 8))
    step(ours, optimizer, batch[:, 2 * part : 2 * part + 2])
    write_checkpoint(folder, ours, optimizer)
    loss, _ = step(ours, optimizer, batch[:, 2 * part : 2 * part + 2])
    dist.all_reduce(loss)
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))["tp"]
    other = parallelize(decoder_lm(WITHOUT_EXPERTS), alone)
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
    ours, optimizer, part = in_two_dimensions(copy.deepcopy(exact), mp_policy=policy)
    batch = torch.randint(31, (2, 4, 8))
    mine, _ = step(ours, optimizer, batch[:, 2 * part : 2 * part + 2])
    dist.all_reduce(mine)
    torch.testing.assert_close(mine.float() / ranks, exact(*batch).detach(), rtol=1e-3, atol=0)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", CHECKS)
def test_four_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)

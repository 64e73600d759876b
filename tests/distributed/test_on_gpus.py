"""On two GPUs, with NCCL: replayed calls, data-parallel and sharded; sharded FP8 products; a model
with tensor, sequence and vocabulary parallelism.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import opfuser
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.models.parallel import parallelize
from opfuser.recipe import Float8BlockScaling, Float8CurrentScaling
from tests.distributed.ranks import on_two_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

RANKS = 2
CONFIG = DecoderConfig(997, 128, 3, 4, device="cuda")


def models(rank: int) -> tuple[nn.Module, nn.Module]:
    """The same model twice; the calls of the first one are replayed."""
    torch.manual_seed(1)
    model, twin = decoder_lm(CONFIG), decoder_lm(CONFIG)
    twin.load_state_dict(model.state_dict())
    model.replay = "on"
    return model, twin


def steps(rank: int, pair: list[nn.Module], count: int) -> None:
    """Training steps of two micro-batches, in which the models must remain equal."""
    torch.manual_seed(2 + rank)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in pair]
    for _ in range(count):
        for last in (False, True):
            tokens, targets = torch.randint(0, 997, (2, 2, 33), device="cuda")
            losses = []
            for m in pair:
                with contextlib.ExitStack() as stack:
                    if isinstance(m, DistributedDataParallel) and not last:
                        stack.enter_context(m.no_sync())
                    losses.append(m(tokens, targets))
                    losses[-1].backward()
            torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def work(rank: int, kind: str) -> None:
    model, twin = models(rank)
    pair: list[nn.Module] = [model, twin]
    if kind == "sharded":
        for m in pair:
            fully_shard(m, mesh=init_device_mesh("cuda", (RANKS,)))
    else:
        as_view = kind == "views of buckets"
        pair = [DistributedDataParallel(m, gradient_as_bucket_view=as_view) for m in pair]
    steps(rank, pair, 6)
    (record,) = model.last_plan.replays
    assert kind == "sharded" or record.replayed >= 10, record


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["buckets", "views of buckets", "sharded"])
def test_replayed(kind: str, tmp_path: Path) -> None:
    on_two_gpus(tmp_path, work, kind)


def linear_results(op: opfuser.BasicLinear, given: list[Tensor], recipe: Any) -> list[Tensor]:
    """Output, and gradients of input and weight."""
    x, w, dy = given
    op.weight = nn.Parameter(w.clone())
    x = x.clone().requires_grad_()
    with opfuser.autocast(recipe=recipe):
        y = op(x)
    return [y.detach(), *torch.autograd.grad(y, [x, op.weight], dy)]


def quantized_products(rank: int) -> None:
    device = torch.device("cuda", rank)
    torch.manual_seed(1)
    how: Any = {"device": device, "dtype": torch.bfloat16}
    shapes = (RANKS * 96, 512), (1024, 512), (RANKS * 96, 1024)
    x, w, dy = given = [torch.randn(*shape).to(**how) for shape in shapes]
    # bf16 keeps 8 bits of what ranks add up; with other scales E5M2 rounds by up to an eighth.
    for recipe, bound in ((Float8BlockScaling(), 0.01), (Float8CurrentScaling(), 1 / 8)):
        y, dx, dw = linear_results(opfuser.BasicLinear(512, 1024, **how), given, recipe)
        for mode, sliced in (("column", (0, 0, -1, -1, 0, 0)), ("row", (-1, -1, 0, 0, -1, -1))):
            op = opfuser.BasicLinear(
                512, 1024, tensor_parallel_mode=mode, sequence_parallel=True, **how
            )
            mine = [
                t.chunk(RANKS, dim)[rank].contiguous()
                for t, dim in zip((x, w, dy, y, dx, dw), sliced)
            ]
            for ours, theirs in zip(linear_results(op, mine[:3], recipe), mine[3:]):
                apart = (ours.float() - theirs.float()).norm() / theirs.float().norm()
                assert apart.item() < bound, (mode, recipe)


@pytest.mark.slow
def test_sharded_quantized_products(tmp_path: Path) -> None:
    on_two_gpus(tmp_path, quantized_products)


def tensor_parallel(rank: int) -> None:
    """Losses and weights of the model on one GPU, in fp32 and in bf16, over three steps."""
    device = torch.device("cuda", rank)
    mesh = init_device_mesh("cuda", (RANKS,))
    for dtype, sequence, bound in (
        (torch.float32, True, 1e-4),
        (torch.float32, False, 1e-4),
        (torch.bfloat16, True, 0.02),
    ):
        torch.manual_seed(1)
        how: Any = {"device": device, "dtype": dtype, "qk_norm": True}
        exact = decoder_lm(DecoderConfig(997, 256, 2, 4, num_kv_heads=2, **how))
        ours = parallelize(copy.deepcopy(exact), mesh, sequence_parallel=sequence)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (exact, ours)]
        for _ in range(3):
            tokens, targets = torch.randint(997, (2, 2, 64), device=device)
            targets[0, 3] = -100
            losses = [m(tokens, targets) for m in (exact, ours)]
            torch.testing.assert_close(losses[1], losses[0], rtol=bound, atol=0)
            for loss in losses:
                loss.backward()
            grads = [m.embedding.weight.grad for m in (exact, ours)]
            apart = (grads[1].full_tensor() - grads[0]).float().norm()
            assert apart < 2 * bound * grads[0].float().norm(), (dtype, sequence)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert ours.last_plan.fused("forward")["linear_cross_entropy"] == 1


@pytest.mark.slow
def test_tensor_parallel(tmp_path: Path) -> None:
    on_two_gpus(tmp_path, tensor_parallel)

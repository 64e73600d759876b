"""What users of DistributedDataParallel switch on, on two ranks against one: one start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import opfuser
from opfuser.models import DecoderConfig, decoder_lm
from tests.contract.gradients import handed_over
from tests.distributed.ranks import DEVICES, Checks, Outcomes, assert_passed
from tests.distributed.sharded import Batch, batches, gradients_of_one

pytestmark = pytest.mark.distributed

RANKS = 2
BF16 = torch.bfloat16
CHECKS = check = Checks()
CONFIG = DecoderConfig(29, 16, 2, 2, dtype=torch.float64)


def pair(into: str = "", **arguments: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The model that one rank would have; an equal one; and that wrapped, with small buckets."""
    torch.manual_seed(1)
    one, ours = decoder_lm(CONFIG), decoder_lm(CONFIG)
    ours.load_state_dict(one.state_dict())
    for op in ours.modules():
        if into and isinstance(op, opfuser.Linear):
            setattr(op, into, True)
    return one, ours, DistributedDataParallel(ours, bucket_cap_mb=0.01, **arguments)


def backward(wrapped: Any, parts: list[Batch], rank: int) -> None:
    """Of the sum over micro-batches, reduced with the last one."""
    for n, (tokens, targets) in enumerate(parts):
        with contextlib.nullcontext() if n == len(parts) - 1 else wrapped.no_sync():
            wrapped(tokens[rank], targets[rank]).backward()


def assert_same(
    ours: nn.Module, one: nn.Module, get: Callable[[Any], Tensor] = lambda p: p.grad
) -> None:
    for (name, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(get(p), q.grad, rtol=1e-9, atol=1e-11, msg=name)


WAYS: list[dict[str, bool]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
]


@check
def micro_batches(rank: int, ranks: int) -> None:
    """Of different sizes, in steps that start without gradients or with zeros."""
    for into in ("", "accumulate_into_grad"):
        for arguments in WAYS:
            one, ours, wrapped = pair(into, **arguments)
            # The first backward pass of a static graph is not one of no_sync, in torch.
            for sizes, to_none in (((2,), True), ((2, 1, 3), True), ((1, 2), False)):
                for m in (one, ours):
                    m.zero_grad(set_to_none=to_none)
                parts = batches(ranks, sizes)
                gradients_of_one(one, parts)
                backward(wrapped, parts, rank)
                assert_same(ours, one)
    one, ours, wrapped = pair("accumulate_into_grad")
    weight = next(op.weight for op in ours.modules() if isinstance(op, opfuser.Linear))
    told = []
    for tokens, targets in batches(ranks, (2, 2)):
        loss = wrapped(tokens[rank], targets[rank])
        told.append(handed_over(loss, weight))
        loss.backward()
    assert told == [[True], [False]]  # which DDP's hooks go on from


@check
def ranks_with_more_micro_batches(rank: int, ranks: int) -> None:
    """Of other sizes too: only the last one of each rank is reduced."""
    for into in ("", "accumulate_into_grad", "accumulate_into_main_grad"):
        one, ours, wrapped = pair(into)
        own = [batches(ranks, sizes) for sizes in ((2, 1, 3), (4,))]
        for r, parts in enumerate(own):
            for tokens, targets in parts:
                (one(tokens[r], targets[r]) / ranks).backward()
        main: list[Any] = []
        told: list[Tensor] = []
        if into == "accumulate_into_main_grad":
            main = [op.weight for op in ours.modules() if isinstance(op, opfuser.Linear)]
        for weight in main:
            weight.main_grad = torch.full_like(weight, float("nan"))
            weight.overwrite_main_grad = True
        hooks = [w.register_post_accumulate_grad_hook(told.append) for w in main]
        for n, part in enumerate(own[rank]):
            with contextlib.nullcontext() if n == len(own[rank]) - 1 else wrapped.no_sync():
                backward(wrapped, [part], rank)
            for weight in main:
                weight.overwrite_main_grad = False
        assert len(told) == len(main) * len(own[rank])
        for hook in hooks:
            hook.remove()
        for weight in main:  # the framework that hands out the buffers reduces them
            assert weight.grad_added_to_main_grad
            dist.all_reduce(weight.main_grad)
            weight.grad.add_(weight.main_grad / ranks)  # to zeros, but for the table of a tied head
        assert_same(ours, one)


def _append(names: list[str], name: str, p: Tensor) -> None:
    names.append(name)


@check
def hooks_of_parameters(rank: int, ranks: int) -> None:
    """Hooks see what this rank has computed, and may change it before it is reduced."""
    for into in ("", "accumulate_into_grad"):
        for arguments in WAYS:
            one, ours, wrapped = pair(into, **arguments)
            seen: list[str] = []
            for name, p in ours.named_parameters():
                p.register_hook(lambda grad: grad * 3)
                tell = partial(_append, seen, name)
                p.register_post_accumulate_grad_hook(tell)
            (part,) = batches(ranks)
            for _ in range(2):
                seen.clear()
                for m in (one, ours):
                    m.zero_grad()
                gradients_of_one(one, [part])
                backward(wrapped, [part], rank)
                for p in one.parameters():
                    p.grad *= 3
                assert_same(ours, one)
                assert sorted(seen) == sorted(name for name, _ in ours.named_parameters())


class Branches(nn.Module):
    """A network of which a rank may leave a part out."""

    def __init__(self, **into: bool) -> None:
        super().__init__()
        width = {"dtype": torch.float64, **into}
        self.first = opfuser.Sequential(opfuser.Linear(6, 6, **width), opfuser.GELU())
        self.second = opfuser.Residual(opfuser.Linear(6, 6, **width))

    def forward(self, x: Tensor, short: bool) -> Tensor:
        x = self.first(x)
        return x if short else self.second(x)


@check
def parts_that_are_left_out(rank: int, ranks: int) -> None:
    """By one rank or by all, with gradients from before or without."""
    for into in ({}, {"accumulate_into_grad": True}):
        torch.manual_seed(1)
        one, ours = Branches(), Branches(**into)
        ours.load_state_dict(one.state_dict())
        wrapped = DistributedDataParallel(ours, find_unused_parameters=True)
        xs = torch.randn(ranks, 3, 6, dtype=torch.float64)
        for short in ((True, False), (False, False), (False, True)):
            (sum(one(xs[r], short[r]).square().sum() for r in range(ranks)) / ranks).backward()
            wrapped(xs[rank], short[rank]).square().sum().backward()
            assert_same(ours, one)


@check
def recomputed(rank: int, ranks: int) -> None:
    """By checkpoints; those that autograd starts within a backward pass need a static graph."""
    for impl, arguments in (
        (CheckpointImpl.NO_REENTRANT, {}),
        (CheckpointImpl.NO_REENTRANT, {"static_graph": True}),
        (CheckpointImpl.REENTRANT, {"static_graph": True}),
    ):
        for into in ("", "accumulate_into_grad"):
            one, ours, _ = pair(into)
            for n, layer in enumerate(ours.layers):
                ours.layers[n] = checkpoint_wrapper(layer, checkpoint_impl=impl)
            wrapped = DistributedDataParallel(ours, **arguments)
            for sizes in ((2,), (1, 2)):
                parts = batches(ranks, sizes)
                gradients_of_one(one, parts)
                backward(wrapped, parts, rank)
                assert_same(ours, one)


@check
def gradients_in_half_precision(rank: int, ranks: int) -> None:
    """A communication hook rounds what is sent, and nothing else."""
    gpu = torch.get_default_device().type == "cuda"  # torch has the bf16 hook for NCCL alone
    hook, dtype = (bf16_compress_hook, BF16) if gpu else (fp16_compress_hook, torch.float16)
    for arguments in WAYS[:2]:
        one, ours, _ = pair("accumulate_into_grad")
        for m in (one, ours):
            m.float()
        wrapped = DistributedDataParallel(ours, **arguments)
        wrapped.register_comm_hook(None, hook)
        tokens, targets = batches(ranks)[0]
        params = list(one.parameters())
        sent = []
        for r in range(ranks):
            grads = torch.autograd.grad(one(tokens[r], targets[r]), params)
            sent.append([g.to(dtype) / ranks for g in grads])
        wrapped(tokens[rank], targets[rank]).backward()
        for p, *both in zip(ours.parameters(), *sent):
            assert p.grad.dtype == torch.float32
            assert torch.equal(p.grad, sum(both).float())


@check
def gradients_of_low_rank(rank: int, ranks: int) -> None:
    """PowerSGD, whose approximation of gradients that have the rank it is asked for is exact."""
    to = {"dtype": torch.float64}
    torch.manual_seed(1)
    one, ours = (
        opfuser.Sequential(
            opfuser.Linear(12, 16, accumulate_into_grad=adds, **to),
            opfuser.GELU(),
            opfuser.Linear(16, 8, accumulate_into_grad=adds, **to),
        )
        for adds in (False, True)
    )
    ours.load_state_dict(one.state_dict())
    wrapped = DistributedDataParallel(ours)
    rows = 2
    state = PowerSGDState(None, rows * ranks, start_powerSGD_iter=2, min_compression_rate=1)
    wrapped.register_comm_hook(state, powerSGD_hook)
    for _ in range(4):
        for m in (one, ours):
            m.zero_grad(set_to_none=False)
        xs = torch.randn(ranks, rows, 12, **to)
        (sum(one(x).square().sum() for x in xs) / ranks).backward()
        wrapped(xs[rank]).square().sum().backward()
        assert_same(ours, one)
    assert state.p_memory_dict  # it was used


@pytest.mark.parametrize("outcomes", DEVICES, indirect=True, scope="module")
@pytest.mark.parametrize("name", CHECKS)
def test_data_parallel(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)

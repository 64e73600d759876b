"""Scales that ranks agree on, or keep as their own, also in DistributedDataParallel: one start."""

from __future__ import annotations

import functools
import gc
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import opfuser
from opfuser.recipe import DelayedScaling, Float8PredictedScaling, Recipe
from tests.distributed.ranks import Check, Outcomes, assert_passed

pytestmark = pytest.mark.distributed

RANKS = 4  # two groups of two
X = torch.linspace(-1, 3, 5 * 32).view(5, 32)
DELAYED = DelayedScaling(amax_history_len=2)


@functools.lru_cache(None)
def pairs() -> dist.ProcessGroup:
    """The group of this rank: two neighbors."""
    groups = [dist.new_group([n, n + 1]) for n in range(0, dist.get_world_size(), 2)]
    return groups[dist.get_rank() // 2]


def model(ops: int = 1) -> Any:
    generator = torch.Generator().manual_seed(0)
    linears = [opfuser.BasicLinear(32, 32) for _ in range(ops)]
    for op in linears:
        op.weight.data = torch.randn(32, 32, generator=generator)
    return opfuser.Sequential(*linears)


def step(seq: Any, x: Tensor, recipe: Recipe = DELAYED, group: Any = None) -> None:
    with opfuser.autocast(recipe=recipe, amax_reduction_group=group):
        y = seq(x)
    y.square().sum().backward()


def opened(group: Any, recipe: Recipe = DELAYED) -> None:
    """Scales follow when a region opens."""
    with opfuser.autocast(recipe=recipe, amax_reduction_group=group):
        pass


def of_all_ranks(t: Tensor) -> Tensor:
    own = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(own, t.contiguous())
    return torch.stack(own)


def agree(scales: Tensor) -> list[bool]:
    """For each role, whether the scales of all ranks are the same."""
    return (scales == scales[0]).all(0).tolist()


def ranks_agree_on_scales(rank: int, ranks: int) -> None:
    world = dist.group.WORLD
    for recipe in (DELAYED, Float8PredictedScaling(margin=2)):
        seq = model(2)
        for n in range(3):
            step(seq, X * (rank + 1) * 3**n, recipe, world)
            opened(world, recipe)
            for op in seq:
                assert agree(of_all_ranks(op.quantization.scale)) == [True, True, True]
        largest = 3 * ranks * 3.0**2
        scale = 448 / largest / 2.0**recipe.margin
        torch.testing.assert_close(seq[0].quantization.scale[0], torch.tensor(scale))


def ranks_go_their_own_ways(rank: int, ranks: int) -> None:
    """Inputs and gradients differ, weights do not."""
    for recipe, group in (
        (DelayedScaling(reduce_amax=False), dist.group.WORLD),
        (Float8PredictedScaling(reduce_amax=False), dist.group.WORLD),
        (DELAYED, None),
    ):
        seq = model()
        opened(None)  # of what was left
        with mock.patch.object(dist, "all_reduce", side_effect=AssertionError):
            for _ in range(2):
                step(seq, X * (rank + 1), recipe, group)
            opened(None, recipe)
        assert agree(of_all_ranks(seq[0].quantization.scale)) == [False, True, False]


def a_rank_sees_nothing_or_overflows(rank: int, ranks: int) -> None:
    world, seq = dist.group.WORLD, model()
    for x in (X, X * (rank + 1)):
        if rank != ranks - 1 or x is X:
            step(seq, x, group=world)
        else:
            opened(world)
        opened(world)
    scales = of_all_ranks(seq[0].quantization.scale)
    assert agree(scales) == [True, True, True]
    torch.testing.assert_close(scales[0, 0], torch.tensor(448 / 3 / (ranks - 1)))
    for value in (torch.inf, torch.nan):
        step(seq, torch.full_like(X, value) if rank == 0 else X * 0.5, group=world)
        step(seq, torch.full_like(X, value) if rank == 0 else X * 0.5, group=world)
        opened(world)
        scales = of_all_ranks(seq[0].quantization.scale)
        assert agree(scales) == [True, True, True]
        torch.testing.assert_close(scales[0, 0], torch.tensor(448 / 1.5))


def one_reduction_per_group(rank: int, ranks: int) -> None:
    """Of states that are alive in one rank alone, too."""
    world, seqs, others = dist.group.WORLD, [model(3) for _ in range(2)], model(2)
    for seq in seqs:
        step(seq, X * (rank + 1), group=world)
    step(others, X * (rank + 1), group=pairs())
    if rank:
        del seqs[0], seq
        gc.collect()
    reduce, groups = dist.all_reduce, []

    def counted(tensor: Tensor, op: Any, group: Any) -> None:
        groups.append(group)
        reduce(tensor, op, group)

    with mock.patch.object(dist, "all_reduce", counted):
        opened(world)
    assert groups == [pairs(), world]
    assert agree(of_all_ranks(seqs[-1][2].quantization.scale)) == [True, True, True]
    mine = others[1].quantization.scale
    scales = of_all_ranks(mine)
    assert torch.equal(mine, scales[rank ^ 1])
    assert not torch.equal(mine, scales[(rank + 2) % ranks])


def states_wait_for_a_region_of_their_group(rank: int, ranks: int) -> None:
    world, seq = dist.group.WORLD, model()
    for x in (X, X * (rank + 1)):
        with opfuser.autocast(recipe=DELAYED, amax_reduction_group=world):
            y = seq(x)
        opened(None)  # the group's region was open before
        y.square().sum().backward()
        before = seq[0].quantization.scale.clone()
        opened(None)  # it was not
        torch.testing.assert_close(seq[0].quantization.scale, before, rtol=0, atol=0)
        opened(world)
        scales = of_all_ranks(seq[0].quantization.scale)
        # The first scales came from the same values.
        assert (x is X) == torch.equal(scales[rank, 2], before[2])
        assert agree(scales) == [True, True, True]


class Holder(nn.Module):
    """A root that is none of opfuser's, with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("own", torch.zeros(2))
        self.layers = opfuser.Sequential(
            opfuser.Linear(32, 32), opfuser.GELU(), opfuser.BasicLinear(32, 16)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def outcome(rank: int, recipe: Recipe, group: Any, **options: Any) -> list[Tensor]:
    """Outputs and gradients of three steps of a run that is resumed, and the last scales."""
    holder = Holder()
    holder.own += rank  # so that it shows whether buffers were sent
    seen: list[Tensor] = []
    called: nn.Module = holder
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 32, generator=generator) * 10.0**rank
        with opfuser.autocast(recipe=recipe, amax_reduction_group=group):
            y = called(x)
        y.square().sum().backward()
        if number:
            seen += [y.detach(), *[p.grad.clone() for p in holder.parameters()]]
        else:
            holder.zero_grad()
            called = DistributedDataParallel(holder, **options)
    sent = options.get("broadcast_buffers", True)
    assert holder.own.tolist() == [0.0 if sent else rank] * 2
    state = holder.state_dict()
    return [*seen, *(t.clone() for name, t in state.items() if name.endswith("quantization.scale"))]


def scales_in_data_parallel(rank: int, ranks: int) -> None:
    """DistributedDataParallel sends buffers of rank 0: all but scales, with a group or without."""
    for recipe in (DelayedScaling(amax_history_len=3), Float8PredictedScaling(margin=0)):
        for group in (None, dist.group.WORLD):
            found = outcome(rank, recipe, group)
            alone = outcome(rank, recipe, group, broadcast_buffers=False)
            for mine, wanted in zip(found, alone, strict=True):
                assert torch.equal(mine, wanted)
            for scale in found[-2:]:
                same = agree(of_all_ranks(scale))
                assert not same[0] if group is None else all(same)


FUNCTIONS: tuple[Check, ...] = (
    ranks_agree_on_scales,
    ranks_go_their_own_ways,
    a_rank_sees_nothing_or_overflows,
    one_reduction_per_group,
    states_wait_for_a_region_of_their_group,
    scales_in_data_parallel,
)


def quietly(function: Check) -> Check:
    def run(rank: int, ranks: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FP8 is emulated")
            warnings.filterwarnings("ignore", ".broadcast_buffers. is deprecated")  # since 2.13
            function(rank, ranks)

    return run


CHECKS = {function.__name__: quietly(function) for function in FUNCTIONS}


@pytest.mark.parametrize("name", CHECKS)
def test_scales(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)

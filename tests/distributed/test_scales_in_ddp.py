"""Scales of FP8 in DistributedDataParallel, which sends buffers of rank 0."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import opfuser
from opfuser.recipe import DelayedScaling, Float8PredictedScaling, Recipe
from tests.distributed.ranks import Check, Outcomes, assert_passed

pytestmark = pytest.mark.distributed

RANKS = 2
RECIPES = DelayedScaling(amax_history_len=3), Float8PredictedScaling(margin=0)
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    def quietly(rank: int, ranks: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FP8 is emulated")
            warnings.filterwarnings("ignore", ".broadcast_buffers. is deprecated")  # since 2.13
            function(rank, ranks)

    CHECKS[function.__name__] = quietly
    return function


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


def inputs(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 32, generator=generator) * 100.0**rank


def scales(model: nn.Module) -> list[Tensor]:
    return [
        t.clone() for name, t in model.state_dict().items() if name.endswith("quantization.scale")
    ]


def outcome(rank: int, recipe: Recipe, group: Any, **options: Any) -> list[Tensor]:
    """Outputs and gradients of three steps of a run that is resumed, and the last scales."""
    model = Holder()
    model.own += rank  # so that it shows whether buffers were sent
    with opfuser.autocast(recipe=recipe, amax_reduction_group=group):
        y = model(inputs(rank, 0))
    y.square().sum().backward()
    model.zero_grad()
    wrapped = DistributedDataParallel(model, **options)
    seen: list[Tensor] = []
    for step in range(1, 4):
        with opfuser.autocast(recipe=recipe, amax_reduction_group=group):
            y = wrapped(inputs(rank, step))
        y.square().sum().backward()
        seen += [y.detach(), *[p.grad.clone() for p in model.parameters()]]
    sent = options.get("broadcast_buffers", True)
    assert model.own.tolist() == [0.0 if sent else rank] * 2
    return [*seen, *scales(model)]


@check
def scales_stay_those_of_their_rank(rank: int, ranks: int) -> None:
    for recipe in RECIPES:
        default = outcome(rank, recipe, None)
        assert len(scales(Holder())) == 0
        alone = outcome(rank, recipe, None, broadcast_buffers=False)
        for mine, wanted in zip(default, alone, strict=True):
            assert torch.equal(mine, wanted)
        others = [torch.empty_like(default[-1]) for _ in range(ranks)]
        dist.all_gather(others, default[-1])
        assert not torch.equal(others[0][0], others[1][0])


@check
def ranks_agree_in_a_group(rank: int, ranks: int) -> None:
    for recipe in RECIPES:
        default = outcome(rank, recipe, dist.group.WORLD)
        alone = outcome(rank, recipe, dist.group.WORLD, broadcast_buffers=False)
        for mine, wanted in zip(default, alone, strict=True):
            assert torch.equal(mine, wanted)
        for scale in default[-2:]:
            others = [torch.empty_like(scale) for _ in range(ranks)]
            dist.all_gather(others, scale)
            assert torch.equal(others[0], others[1])


@pytest.mark.parametrize("name", CHECKS)
def test_data_parallel(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)

"""Checkpoints that go between one, two and four ranks: weights, masters, moments, FP8 scales."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import opfuser
from opfuser.recipe import DelayedScaling
from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of
from tests.distributed.test_distributed_checkpoints import IN_BF16, WAYS, Training

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FOLDER = "OPFUSER_TEST_CHECKPOINTS_OF_FOUR"
STARTS = 2, 4, 2, 1
"""Numbers of ranks, one start after the other. The first two write."""
RECIPE = DelayedScaling(amax_history_len=3)
CONFIG = replace(IN_BF16, recipe=RECIPE)
CHECKS: dict[str, Check] = {}


def folder(way: str, ranks: int) -> Path:
    return Path(os.environ[FOLDER], f"{way} on {ranks}")


def step(training: Training, n: int) -> None:
    """One on this rank's part of four sequences."""
    generator = torch.Generator().manual_seed(n)
    batch = torch.randint(29, (2, 4, 5), generator=generator)
    tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch)
    with opfuser.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
        loss = training.model(tokens, targets)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def whole(training: Training) -> dict[str, Tensor]:
    """All tensors of the model and of the optimizer, gathered."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    states: dict[str, Any] = optimizer["state"]  # type: ignore[assignment]
    found = {f"{p}/{key}": t for p, state in states.items() for key, t in state.items()}
    return {**model, **found}


def write(way: str, ranks: int) -> None:
    training = Training(WAYS[way], config=CONFIG)
    for n in range(2):
        step(training, n)
    with opfuser.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
        pass  # ranks agree on what they have seen
    dcp.save({"training": training}, checkpoint_id=folder(way, ranks))
    found = whole(training)
    if dist.get_rank() == 0:
        torch.save(found, folder(way, ranks) / "whole.pt")
    dist.barrier()


def read(way: str, written: Path) -> None:
    """Everything is what was written, to the bit, and training goes on."""
    training = Training(WAYS[way], seed=2, config=CONFIG)
    dcp.load({"training": training}, checkpoint_id=written)
    ours, exact = whole(training), torch.load(written / "whole.pt")
    assert ours.keys() == exact.keys()
    for kind in ("weight", "amax_history", "scale", "master_param", "exp_avg_sq"):
        assert any(name.endswith(kind) for name in exact), kind
    for name, value in exact.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)
    step(training, 2)


def way_check(way: str) -> None:
    def run(rank: int, ranks: int) -> None:
        warnings.filterwarnings("ignore", "FP8 is emulated")
        if ranks > 1 and not folder(way, ranks).exists():
            write(way, ranks)
        for other in ("sharded", "data-parallel"):
            for writers in {2, 4} - {ranks} if ranks > 1 else {4}:
                if folder(other, writers).exists():
                    read(way, folder(other, writers))

    CHECKS[way] = run


way_check("sharded")
way_check("data-parallel")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Outcomes]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("checkpoints")))
        yield [outcomes_of(__name__, n, tmp_path_factory.mktemp("ranks")) for n in STARTS]


@pytest.mark.parametrize("name", CHECKS)
def test_between_numbers_of_ranks(outcomes: list[Outcomes], name: str) -> None:
    for start in outcomes:
        assert_passed(start, name)

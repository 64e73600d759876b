"""Checkpoints of torch.distributed: written on one rank and read on two, and the other way.

Masters, and FP8 scales: test_checkpoints_of_four.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from opfuser.models import DecoderConfig, decoder_lm
from opfuser.optim import MasterWeights
from tests.distributed.ranks import DEVICES, Checks, Outcomes, assert_passed, outcomes_of
from tests.distributed.sharded import Batch, all_ranks, batches, gradients_of_one
from tests.distributed.sharded import shard as sharded

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # also with no_dist
]

RANKS = 2
CHECKS = check = Checks()
CONFIG = DecoderConfig(29, 16, 2, 2, dtype=torch.float64)
IN_BF16 = DecoderConfig(29, 16, 2, 2, dtype=torch.bfloat16)
FOLDER = "OPFUSER_TEST_CHECKPOINTS"
STEPS = 4, 3  # written after the first ones


class Training(Stateful):
    """A model and its optimizer, with the state that torch gathers of both."""

    def __init__(
        self,
        shard: Callable[[Any], Any] = lambda model: model,
        seed: int = 1,
        config: DecoderConfig = CONFIG,
    ) -> None:
        torch.manual_seed(seed)
        with torch.device("cpu"):  # a GPU draws other parameters
            model = decoder_lm(config)
        self.model: nn.Module = shard(model.to(torch.get_default_device()))
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        in_bf16 = config.dtype is torch.bfloat16
        make: Any = partial(MasterWeights, self.model, AdamW) if in_bf16 else AdamW
        self.optimizer: Optimizer = make(groups, lr=1e-2)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **given)

    def step(self, batch: Batch, rank: int | None = None) -> list[float]:
        """One step; the losses of this rank, or of all where one has all."""
        if rank is None:
            (losses,) = gradients_of_one(self.model, [batch])
        else:
            loss = self.model(batch[0][rank], batch[1][rank])
            loss.backward()
            losses = [loss.item()]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def exact() -> tuple[Training, list[list[float]]]:
    """An unbroken training on one rank, and its losses."""
    training = Training()
    return training, [training.step(batch) for batch in batches(RANKS, [2] * sum(STEPS))]


def with_checkpoints(model: Any) -> Any:
    mesh = all_ranks()
    for n, layer in enumerate(model.layers):
        model.layers[n] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, Callable[[Any], Any]] = {
    "sharded": sharded,
    "checkpointed": with_checkpoints,
    "data-parallel": DistributedDataParallel,
}


def folder(name: str) -> Path:
    return Path(os.environ[FOLDER], name)


@check
def read_by_two(rank: int, ranks: int) -> None:
    """What one rank has written, each way of two continues as the one would have."""
    _, losses = exact()
    for shard in WAYS.values():
        training = Training(shard, seed=2)
        dcp.load({"training": training}, checkpoint_id=folder("one"))
        for batch, wanted in list(zip(batches(ranks, [2] * sum(STEPS)), losses))[STEPS[0] :]:
            assert training.step(batch, rank) == pytest.approx([wanted[rank]], rel=1e-10)


@check
def written_by_two(rank: int, ranks: int) -> None:
    for name, shard in WAYS.items():
        training = Training(shard)
        for batch in batches(ranks, [2] * STEPS[0]):
            training.step(batch, rank)
        dcp.save({"training": training}, checkpoint_id=folder(name))


@pytest.fixture(scope="module", params=DEVICES)
def outcomes(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("checkpoints")))
        training = Training()
        for batch in batches(RANKS, [2] * STEPS[0]):
            training.step(batch)
        dcp.save({"training": training}, checkpoint_id=folder("one"), no_dist=True)
        yield outcomes_of(__name__, RANKS, tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


@pytest.mark.parametrize("name", WAYS)
def test_read_by_one(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, "written_by_two")
    unbroken, losses = exact()
    training = Training(seed=2)
    dcp.load({"training": training}, checkpoint_id=folder(name), no_dist=True)
    for batch, wanted in list(zip(batches(RANKS, [2] * sum(STEPS)), losses))[STEPS[0] :]:
        assert training.step(batch) == pytest.approx(wanted, rel=1e-10)
    for p, q in zip(training.model.parameters(), unbroken.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)

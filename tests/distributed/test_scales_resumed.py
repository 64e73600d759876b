"""Scales of FP8 in distributed checkpoints and whole state dicts: written by two ranks.

What other numbers of ranks read is in test_checkpoints_of_four.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import opfuser
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.recipe import DelayedScaling
from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of
from tests.distributed.sharded import shard

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # also with no_dist
    pytest.mark.filterwarnings("ignore:FP8 is emulated"),
]

FOLDER = "OPFUSER_TEST_SCALES"
DELAYED = DelayedScaling(amax_history_len=4)
FULL = StateDictOptions(full_state_dict=True)
OF_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    def quietly(rank: int, ranks: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FP8 is emulated")
            function(rank, ranks)

    CHECKS[function.__name__] = quietly
    return function


def model(seed: int = 1, recipe: DelayedScaling | None = DELAYED) -> Any:
    torch.manual_seed(seed)
    return decoder_lm(DecoderConfig(29, 32, 2, 2, recipe=recipe))


WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda made: made,
    "sharded": shard,
    "data-parallel": DistributedDataParallel,
}


def folder(name: str) -> Path:
    return Path(os.environ[FOLDER], name)


def train(made: Any, steps: int, rank: int) -> None:
    """Ranks agree on scales; those of the last call enter them when a region opens."""
    group = dist.group.WORLD
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(29, (2, 5), generator=generator)
        with opfuser.autocast(recipe=DELAYED, amax_reduction_group=group):
            loss = made(tokens, tokens.roll(1, 1))
        loss.backward()
        made.zero_grad()
    with opfuser.autocast(recipe=DELAYED, amax_reduction_group=group):
        pass


def scales(made: Any) -> dict[str, Tensor]:
    return {k: t.clone() for k, t in get_model_state_dict(made).items() if "quantization" in k}


def assert_restored(made: Any) -> None:
    wanted = torch.load(folder("scales"))
    found = scales(made)
    assert found.keys() == wanted.keys()
    for name, t in found.items():
        assert torch.equal(t, wanted[name]), name
    for op in made.modules():
        state = op._modules.get("quantization")
        assert state is None or [state.knows(role) for role in ("input", "grad_output")] == [1, 1]


@check
def written_by_two(rank: int, ranks: int) -> None:
    for name in ("data-parallel", "sharded"):
        made = WAYS[name](model())
        train(made, 3, rank)
        dcp.save({"model": get_model_state_dict(made)}, checkpoint_id=folder(name))
        full = get_model_state_dict(made, options=FULL)
        if rank == 0:
            torch.save(full, folder(f"{name} in one file"))
            torch.save({k: t for k, t in full.items() if "quantization" in k}, folder("scales"))
        dist.barrier()
        assert_restored(made)


@check
def handed_out_by_the_first(rank: int, ranks: int) -> None:
    for way in WAYS.values():
        made = way(model(seed=2))
        full = torch.load(folder("sharded in one file")) if rank == 0 else {}
        set_model_state_dict(made, full, options=OF_FIRST)
        assert_restored(made)
    with torch.device("meta"):
        made = model()
    shard(made).to_empty(device="cpu")
    full = torch.load(folder("sharded in one file")) if rank == 0 else {}
    set_model_state_dict(made, full, options=OF_FIRST)
    assert_restored(made)


@check
def kept_by_a_model_without(rank: int, ranks: int) -> None:
    for name in ("plain", "sharded"):
        made = WAYS[name](model(seed=2, recipe=None))
        assert not scales(made)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Scales of a state dict")
            set_model_state_dict(made, torch.load(folder("sharded in one file")), options=FULL)
        assert_restored(made)


@check
def the_first_is_told_what_others_do_not_get(rank: int, ranks: int) -> None:
    full = torch.load(folder("sharded in one file")) if rank == 0 else {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = shard(model(seed=2, recipe=None))
        set_model_state_dict(made, full, options=OF_FIRST)
    found = [str(w.message) for w in told if "Scales of a state dict" in str(w.message)]
    assert bool(found) == (rank == 0)
    for text in found:
        assert "broadcast_from_rank0" in text
        assert "opfuser.init_recipe_state(model, recipe) on every rank" in text


@check
def names_of_a_wrapped_model_without(rank: int, ranks: int) -> None:
    """torch names what it does not know in the wrapper: nothing is dropped."""
    made = DistributedDataParallel(model(seed=2, recipe=None))
    with pytest.raises(RuntimeError, match=r"(?s)Unexpected key.*quantization\.scale"):
        set_model_state_dict(made, torch.load(folder("sharded in one file")))


@check
def told_their_recipe(rank: int, ranks: int) -> None:
    made = model(seed=2, recipe=None)
    opfuser.init_recipe_state(made, DELAYED)
    for way in (shard, DistributedDataParallel):
        wrapped = way(made)
        full = torch.load(folder("sharded in one file")) if rank == 0 else {}
        set_model_state_dict(wrapped, full, options=OF_FIRST)
        assert_restored(wrapped)
        made = model(seed=2, recipe=None)
        opfuser.init_recipe_state(made, DELAYED)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("checkpoints")))
        yield outcomes_of(__name__, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


@pytest.mark.parametrize("name", ["data-parallel", "sharded"])
def test_read_by_one(outcomes: Outcomes, name: str) -> None:
    """As torch's documentation does it, and in its shorter ways."""
    assert_passed(outcomes, "written_by_two")
    target = model(seed=2)
    state = {"model": get_model_state_dict(target)}
    dcp.load(state, checkpoint_id=folder(name), no_dist=True)
    set_model_state_dict(target, state["model"])
    assert_restored(target)
    target = model(seed=2)
    dcp.load({"model": target}, checkpoint_id=folder(name), no_dist=True)
    assert_restored(target)
    target = model(seed=2)  # in place: nobody calls load_state_dict
    dcp.load({"model": target.state_dict()}, checkpoint_id=folder(name), no_dist=True)
    assert_restored(target)


def test_what_a_model_does_not_ask_for_is_not_read(outcomes: Outcomes) -> None:
    """The limit that docs/fp8.md states: nothing of the library runs there."""
    assert_passed(outcomes, "written_by_two")
    target = model(seed=2, recipe=None)
    dcp.load({"model": target}, checkpoint_id=folder("sharded"), no_dist=True)
    assert not scales(target)
    opfuser.init_recipe_state(target, DELAYED)
    dcp.load({"model": target}, checkpoint_id=folder("sharded"), no_dist=True)
    assert_restored(target)

"""Recorded calls of models that several ranks train: bit for bit those of the programs' functions.

Every check trains two equal models, one of which is made and called where nothing is recorded.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import opfuser
from opfuser.engine.recorded.recordable import unrecorded
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.models.parallel import parallelize
from opfuser.recipe import DelayedScaling, Float8BlockScaling, Recipe
from tests.distributed.ranks import Checks, Outcomes, assert_passed
from tests.distributed.sharded import all_ranks, batches, shard

pytestmark = pytest.mark.distributed

RANKS = 2
STEPS = 5  # the last one by recorded functions alone
CHECKS = check = Checks()
CONFIG = DecoderConfig(29, 16, 2, 2)
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

Step = Callable[[Any, Tensor, Tensor, int], Sequence[Tensor]]
"""The passes of a step with these tokens and targets, by its number; outputs."""


def make(**changes: Any) -> Any:
    torch.manual_seed(1)
    return decoder_lm(replace(CONFIG, **changes))


def plain(model: Any, tokens: Tensor, targets: Tensor, n: int) -> list[Tensor]:
    loss = model(tokens, targets)
    loss.backward()
    return [loss.detach()]


@contextmanager
def recorded_functions() -> Iterator[list[str]]:
    """The names of those that run within it; backward passes of a CPU run on its thread, too."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and " specialized " in code.co_filename and code.co_name != "<module>":
            names.append(code.co_name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def local(t: Any) -> Tensor:
    part: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return part.detach().clone()


def trained(model: Any, step: Step, rank: int) -> tuple[list[Tensor], list[str]]:
    """All outputs, gradients and parameters of a few steps; recorded functions of the last one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Tensor] = []
    for n, (tokens, targets) in enumerate(batches(RANKS, [2] * STEPS)):
        with recorded_functions() as names:
            found += step(model, tokens[rank], targets[rank], n)
        found += [local(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found + [local(p) for p in model.parameters()], names


def compare(
    made: Callable[[], Any], rank: int, step: Step = plain, calls: int = 1, unplanned: int = 0
) -> None:
    """Trains with recording and without.

    Args:
        made: returns a model, equal at each call.
        calls: backward passes of each group in a step; each runs as it was recorded. 0: some may
            not, as threads of gloo hold what was gathered a little longer, and a function that
            writes to what was saved runs where nobody else has it.
        unplanned: groups that the plan of the model knows nothing of.
    """
    with unrecorded():
        expected, names = trained(made(), step, rank)
    assert not names
    model = made()
    found, names = trained(model, step, rank)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    recordings = getattr(model, "module", model).last_plan.recordings
    assert [r.refusal for r in recordings] == [None] * len(recordings)
    assert all(len(r.texts) > 1 for r in recordings)
    assert not calls or names.count("backward") == calls * (len(recordings) + unplanned)
    assert names.count("forward") >= names.count("backward")


def micro_batches(model: Any, tokens: Tensor, targets: Tensor, n: int, keeps: bool) -> Any:
    """Reduced with the last one, while parameters stay gathered or not."""
    for last in (False, False, True):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last or not keeps)
        yield from plain(model, tokens, targets, n)


def evaluated(model: Any, tokens: Tensor, targets: Tensor, n: int) -> list[Tensor]:
    """Around a step calls without gradients."""
    with torch.no_grad():
        before = model(tokens, targets)
    losses = plain(model, tokens, targets, n)
    with torch.inference_mode():
        return [*losses, before, model(tokens, targets).clone()]


def two_graphs(model: Any, tokens: Tensor, targets: Tensor, n: int) -> list[Tensor]:
    """Two forward passes, whose parameters are gathered again for both backward passes."""
    losses = [model(tokens, targets), model(targets, tokens)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def frozen(model: Any, tokens: Tensor, targets: Tensor, n: int) -> list[Tensor]:
    model.layers[1].requires_grad_(n < 1)
    return plain(model, tokens, targets, n)


@check
def sharded(rank: int, ranks: int) -> None:
    """Parameters are gathered into other memory in each pass, and gone in between."""
    compare(lambda: shard(make()), rank)
    compare(lambda: shard(make(), reshard_after_forward=False), rank)
    compare(lambda: shard(make(), mp_policy=BF16), rank)
    compare(lambda: shard(make(tied_head=False, dtype=torch.bfloat16)), rank)


@check
def steps_of_sharded(rank: int, ranks: int) -> None:
    def made() -> Any:
        return shard(make(), mp_policy=BF16)

    for keeps in (False, True):
        compare(made, rank, partial(micro_batches, keeps=keeps), calls=3)
    compare(made, rank, two_graphs, calls=2)
    compare(made, rank, evaluated)
    compare(made, rank, frozen)


@check
def units_that_are_operations(rank: int, ranks: int) -> None:
    """torch derives their class from that of the operation, which stays the library's own."""

    def made() -> Any:
        model = make()
        for layer in model.layers:
            fully_shard(layer, mesh=all_ranks())
        fully_shard([model.embedding, model.norm, model.head], mesh=all_ranks())
        return fully_shard(model, mesh=all_ranks())

    compare(made, rank)


@check
def recomputed(rank: int, ranks: int) -> None:
    """In backward, when the parameters are gathered again."""

    def made() -> Any:
        model = make()
        for n, layer in enumerate(model.layers):
            model.layers[n] = fully_shard(checkpoint_wrapper(layer), mesh=all_ranks())
        return fully_shard(model, mesh=all_ranks())

    compare(made, rank, unplanned=CONFIG.num_layers)


def unsynchronised(model: Any, tokens: Tensor, targets: Tensor, n: int) -> Any:
    for last in (False, True):
        with contextlib.nullcontext() if last else model.no_sync():
            yield from plain(model, tokens, targets, n)


@check
def wrapped(rank: int, ranks: int) -> None:
    """In DistributedDataParallel, whose hooks take the gradients."""
    for arguments in ({}, {"gradient_as_bucket_view": True}):
        made = partial(DistributedDataParallel, bucket_cap_mb=0.01, **arguments)
        compare(lambda made=made: made(make()), rank)
        compare(lambda made=made: made(make()), rank, unsynchronised, calls=2)


def parallel(sequence: bool) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,))
    return parallelize(make(), mesh, sequence_parallel=sequence)


@check
def tensor_parallel(rank: int, ranks: int) -> None:
    """Parameters are DTensors; collectives stand in the lines. All ranks have one batch."""

    def step(model: Any, tokens: Tensor, targets: Tensor, n: int) -> list[Tensor]:
        tokens, targets = batches(1, [2] * STEPS)[n]
        return plain(model, tokens[0, :, :4], targets[0, :, :4], n)

    for sequence in (False, True):
        compare(lambda sequence=sequence: parallel(sequence), rank, step, calls=0)


@check
def tensor_parallel_in_fp8(rank: int, ranks: int) -> None:
    """Operands are gathered as codes, with their scales where these are of this rank's rows."""
    warnings.filterwarnings("ignore", "FP8 is emulated")

    def made() -> opfuser.Sequential:
        torch.manual_seed(rank)
        how: Any = {"dtype": torch.bfloat16, "sequence_parallel": True}
        return opfuser.Sequential(
            opfuser.Linear(128, 256, tensor_parallel_mode="column", **how),
            opfuser.SwiGLU(),
            opfuser.Linear(128, 128, tensor_parallel_mode="row", **how),
        )

    def step(
        model: opfuser.Sequential, tokens: Tensor, targets: Tensor, n: int, recipe: Recipe
    ) -> list[Tensor]:
        torch.manual_seed(RANKS * n + rank)
        x = torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)
        with opfuser.autocast(recipe=recipe):
            y = model(x)
        y.square().mean().backward()
        assert x.grad is not None
        return [y.detach(), x.grad]

    for recipe in (DelayedScaling(), Float8BlockScaling()):
        compare(made, rank, partial(step, recipe=recipe), calls=0)


@check
def ranks_that_record_at_other_times(rank: int, ranks: int) -> None:
    """One by recorded functions, the other one by the program's: the same collectives."""
    with unrecorded() if rank else contextlib.nullcontext():
        model = parallel(True)
        tokens = torch.zeros(2, 4, dtype=torch.long)
        losses = [model(tokens, tokens) for _ in range(4)]
        for loss in losses:
            loss.backward()
    assert bool(model.last_plan.recordings[0].texts) == (rank == 0)
    assert len({loss.item() for loss in losses}) == 1


@check
def all_ranks_become_others(rank: int, ranks: int) -> None:
    """Last, as it ends the group: what was recorded with it is no call of one process."""
    model = opfuser.Sequential(opfuser.RMSNorm(8), opfuser.AllReduce())
    x = torch.ones(2, 8)
    for _ in range(3):
        y = model(x)
    assert model.last_plan.recordings[0].texts
    dist.barrier()
    where = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    try:
        for _ in range(3):
            one = model(x)
        torch.testing.assert_close(y, RANKS * one)
    finally:
        store = dist.PrefixStore("again", where)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    assert torch.equal(model(x), y)


@pytest.mark.parametrize("name", CHECKS)
def test_recorded(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)

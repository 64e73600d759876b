"""Trains the model of train_lm.py on many processes, data-parallel or sharded.

``torchrun --nproc-per-node 2 --max-restarts 3 examples/train_distributed.py``: over NCCL on GPUs,
over gloo on a CPU. Data, model and files are those of train_lm.py, with the same batch, split
evenly between the processes; losses are the same up to rounding. A checkpoint does not depend on
the number of processes, nor on ``--parallel``: train_lm.py can continue it too.

The batch of a step is a function of the seed and the step. If a worker is killed, torchrun restarts
all workers, or with ``--nnodes 1:2`` those that are left. They continue from the last checkpoint
with the batches of an uninterrupted run; metrics of steps after the checkpoint are written again.
``--recipe`` computes in FP8, with scales that all processes share.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lm_data import Batch, Corpus, load_corpus
from lm_run import RunFolder
from lm_trainer import TrainConfig, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from train_lm import (
    INTERRUPTED,
    add_options,
    build_model,
    configured,
    describe_plan,
    make_exact,
    results_line,
    stopped,
)

import opfuser
from opfuser.models.sharding import shard_layers

# They belong to one process.
_NOT_HERE = {"register": False, "twin": False}
_STARTED = "started_by.txt"


class SharedFolder(RunFolder):
    """The folder of a run of several processes: the first one writes, what all of them gather."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, writes=dist.get_rank() == 0)

    def gathered(self, value: Tensor) -> Tensor:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        # The others drop it: no process but the first one holds the whole model.
        return whole.cpu().contiguous() if self.writes else torch.empty(0)

    def placed(self, value: Tensor, parameter: Tensor) -> Tensor:
        value = value.to(parameter.device)
        if not isinstance(parameter, DTensor) or value.dim() == 0:  # AdamW counts steps in a scalar
            return value
        # Every process has read the file, and cuts out its shard.
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(value, mesh, placements, src_data_rank=None)


class DistributedTrainer(Trainer):
    """A trainer that computes the loss of its part of each batch, and agrees with the others."""

    def __init__(
        self, model: nn.Module, called: nn.Module, config: TrainConfig, folder: RunFolder,
        corpus: Corpus,
    ) -> None:  # fmt: skip
        super().__init__(model, config, folder, corpus)
        self.called = called

    def to_device(self, batch: Batch) -> Batch:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return super().to_device(Batch(*(t.chunk(ranks)[rank] for t in batch)))

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The region in which the model is called; processes agree on the scales of a recipe."""
        recipe = self.config.model.recipe
        scales = opfuser.autocast(
            recipe is not None, recipe=recipe, amax_reduction_group=dist.group.WORLD
        )
        with super().autocast(), scales:
            yield

    def save(self) -> None:
        # One more region: they agree on what they have seen since the last one, too.
        with self.autocast():
            pass
        super().save()
        dist.barrier()  # none loads it, or ends, before the first one has written it

    def loss(self, batch: Batch) -> Tensor:
        with self.autocast():
            return self.called(*batch)

    def mean(self, loss: Tensor) -> float:
        # All parts are as large, so that the mean of their means is that of the batch.
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def clip(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def stops(self, requested: bool) -> bool:
        """Whether any process was asked to: one that went on alone would wait for the others."""
        told = torch.tensor(int(requested), device=self.config.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told.item())


def is_started_again(path: Path) -> bool:
    """Whether torchrun has started the run of this folder before, with any number of processes.

    Each agent of torchrun counts its own restarts, and none for processes that join or leave.
    """
    started = path / _STARTED
    launch = launch_id()
    again = launch != "none" and started.exists() and started.read_text() == launch
    again |= int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return again and (path / "checkpoint.safetensors").exists()


def launch_id() -> str:
    """What all agents of one torchrun share; none of its own where it has a fixed set of nodes."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


def name_of_start(store: dist.Store, rank: int, ranks: int) -> str:
    """A name that the processes of this start agree on, and that no earlier start had.

    The store of lost workers, with their addresses, is that of the next ones in torch 2.13, and
    nothing else tells them apart.
    """
    mine = uuid.uuid4().hex
    store.set(f"process {rank}", mine)
    while rank == 0:
        # Of a process that has not come yet, the first one may find a predecessor, and asks again.
        store.set("start", json.dumps([store.get(f"process {n}").decode() for n in range(ranks)]))
        if all(store.check([f"{mine} {n}"]) for n in range(1, ranks)):
            return mine
        time.sleep(0.05)
    while True:
        names = json.loads(store.get("start"))
        if names[rank : rank + 1] == [mine]:
            store.set(f"{names[0]} {rank}", "")
            return str(names[0])
        time.sleep(0.05)


def parse_args(argv: list[str] | None) -> tuple[TrainConfig, Path, bool, str]:
    """The configuration, the folder, whether to continue the run in it, and how to share work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        default="fsdp",
        help="each process holds the whole model, or shards of every layer (default fsdp)",
    )
    add_options(parser)
    given = vars(parser.parse_args(argv))
    parallel = given.pop("parallel")
    given["resume"] |= is_started_again(given["runs"] / given["name"])
    config, path, resume = configured(parser, given)
    alone = [f"--{name}" for name, value in _NOT_HERE.items() if getattr(config, name) != value]
    if alone:
        parser.error(f"{', '.join(alone)}: only train_lm.py has that, on one process")
    if ":" in config.device:
        parser.error(f"--device: {config.device} would be that of all processes; say cuda")
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if config.batch % ranks:
        parser.error(f"--batch: {config.batch} sequences are no equal parts for {ranks} processes")
    return config, path, resume, parallel


def build(config: TrainConfig, parallel: str) -> tuple[nn.Module, nn.Module]:
    """The model with the initial weights of train_lm.py, and what is called in its place."""
    model = build_model(config)  # with the seed: the same everywhere
    if parallel == "fsdp":
        mesh = init_device_mesh(torch.device(config.device).type, (dist.get_world_size(),))
        shard_layers(model, mesh=mesh)
        return model, model
    return model, DistributedDataParallel(model, gradient_as_bucket_view=True)


def train(config: TrainConfig, path: Path, resume: bool, parallel: str) -> int:
    """Trains in the process group; returns the exit status."""
    make_exact(config.device)
    folder = SharedFolder(path)
    say: Any = print if folder.writes else lambda text: None
    if not resume:
        folder.start_over()
        folder.write("config.json", json.dumps(asdict(config), indent=1) + "\n")
    folder.write(_STARTED, launch_id())
    say(f"{path}: {dist.get_world_size()} processes, {parallel}, {config.device}, {config.dtype}")
    model, called = build(config, parallel)
    trainer = DistributedTrainer(model, called, config, folder, load_corpus())
    if resume:
        trainer.load()
        say(f"continues after step {trainer.step}")
    say(describe_plan(trainer, model))
    if not trainer.train(parallel):
        return stopped(trainer) if folder.writes else INTERRUPTED
    if folder.writes:
        folder.plot({key: folder.curve(key) for key in ("loss", "validation_loss")})
        print(results_line("results", trainer))
    return 0


def main(argv: list[str] | None = None) -> int:
    arguments = parse_args(argv)
    gpu = arguments[0].device.startswith("cuda")
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # torchrun hands Ctrl-C on; a second one would end a process while others wait for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store, rank, ranks = next(rendezvous("env://"))
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=dist.PrefixStore(name_of_start(store, rank, ranks), store),
        rank=rank,
        world_size=ranks,
    )
    return train(*arguments)


def leave(status: int) -> NoReturn:
    """Ends this process once all are done, without torch's teardown.

    That has aborted a process whose work was done ("terminate called without an active exception"),
    which torchrun takes for a lost worker.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())

"""Checks that run on several ranks at once, all in one start of the processes."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
    start_processes,
)

__all__ = ["DEVICES", "Check", "Checks", "Outcomes", "assert_passed", "on_two_gpus", "outcomes_of"]

_ON_GPUS = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])
DEVICES = ["cpu", _ON_GPUS] if torch.cuda.device_count() > 1 else ["cpu"]
"""Where two ranks can run: over gloo on a CPU, and over NCCL where there are two GPUs."""

Check = Callable[[int, int], None]
"""Is told its rank and the number of ranks."""


class Checks(dict[str, Check]):
    """Those of a module by their names; decorates a function that is one."""

    def __call__(self, function: Check) -> Check:
        self[function.__name__] = function
        return function


Outcomes = list[dict[str, str]]
"""For each rank what came of each check."""


def outcomes_of(module: str, ranks: int, folder: Path, device: str = "cpu") -> Outcomes:
    """Runs the ``CHECKS`` of a module of tests, over gloo or over NCCL.

    Args:
        module: its name.
        ranks: number of processes.
        folder: an empty one.
        device: ``"cuda"`` makes a GPU for each rank the default device.
    """
    # Ranks on a CPU are forks of one process that has imported what all of them need; one that has
    # asked for GPUs must not be forked.
    method = "forkserver" if device == "cpu" and os.name == "posix" else "spawn"
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(["tests.distributed.preloaded"])
    with contextlib.suppress(ProcessRaisedException, ProcessExitedException):  # told rank by rank
        arguments = ranks, str(folder), module, device, dict(os.environ)
        start_processes(_run, arguments, ranks, start_method=method)
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def assert_passed(outcomes: Outcomes, name: str) -> None:
    told = [f"rank {rank}: {told.get(name, 'ended early')}" for rank, told in enumerate(outcomes)]
    assert all(line.endswith("passed") for line in told), "\n".join(told)


def on_two_gpus(folder: Path, function: Callable[..., None], *args: Any) -> None:
    """Calls ``function(rank, *args)`` in two processes over NCCL; skips where GPUs are fewer."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    spawn(_on_a_gpu, (str(folder / "store"), function, args), nprocs=2)


def _on_a_gpu(rank: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def _run(
    rank: int, ranks: int, folder: str, module: str, device: str, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    if device == "cpu":
        warnings.simplefilter("error")
    checks: dict[str, Check] = importlib.import_module(module).CHECKS
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    where: dict[str, Any] = {"store": store, "rank": rank, "world_size": ranks}
    if device == "cuda":
        gpu = torch.device(device, rank)
        torch.cuda.set_device(gpu)
        torch.set_default_device(gpu)
        dist.init_process_group("nccl", device_id=gpu, **where)
    else:
        dist.init_process_group("gloo", **where)
    outcomes: dict[str, str] = {}
    name = ""
    try:
        for name, function in checks.items():
            torch.manual_seed(0)
            function(rank, ranks)
            outcomes[name] = "passed"
    except BaseException:  # also that of pytest.raises
        outcomes[name] = traceback.format_exc()
        raise  # ends the other ranks too, which may wait for this one
    finally:
        Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()  # or a rank that is done is gone while another one still connects to it
    dist.destroy_process_group()

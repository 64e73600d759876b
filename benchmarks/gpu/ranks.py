"""What processes on several ranks agree on, and what they time together."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from benchmarks import timing
from benchmarks.machine import machine

TIMEOUT = timedelta(seconds=60)
FEWEST_ROUNDS, MOST_ROUNDS = 5, 50
IN_A_ROW = 3  # steps of a sample of wall time
LONGEST_STALL = 0.15  # seconds; the host of a sharded model is slow

Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)
Call = TypeVar("Call", bound="Timed")


def start(device: str) -> None:
    """Starts the process group, of one process where torchrun has not started this one."""
    options: dict[str, Any] = {"timeout": TIMEOUT}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **options)


class Ranks:
    """What the processes agree on, over gloo: it works while the collectives of GPUs do not."""

    def __init__(self, device: str) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        number = f":{torch.cuda.current_device()}" if device == "cuda" else ""
        self.device = torch.device(device + number)
        self.control = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def gathered(self, value: Result) -> list[Result]:
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def decided(self, said: bool) -> bool:
        """What the first rank says: clocks differ."""
        return self.gathered(said)[0]

    def attempt(self, call: Callable[[], Result]) -> tuple[Result | None, str | None]:
        """The result of a call on all ranks; or the first error of any of them, on all."""
        result, error = timing.attempt(lambda: told(call))
        for rank, text in enumerate(self.gathered(error)):
            if text is not None:
                return None, f"rank {rank}: {text}"
        return result, None

    def align(self) -> None:
        timing.synchronize(self.device)
        dist.barrier(group=self.control)


def told(call: Callable[[], Result]) -> Result:
    """The result; where an error came from is printed, since rows only have its text."""
    try:
        return call()
    except Exception:
        traceback.print_exc()
        raise


class Sample(NamedTuple):
    """Seconds of a step.

    Attributes:
        wall: of several in a row, behind one that does not count, host and device together; of the
            slowest rank.
        host: until the calls of one return; of the slowest rank.
        device: between two events behind a stall, so that the host's launches do not count; of the
            rank whose stall ends last, for which no other one has to wait.
    """

    wall: float
    host: float
    device: float


class Timed:
    """What ranks do together, and its samples.

    Methods that compute are called through ``Ranks.attempt`` and leave it to others to agree: a
    rank that fails would be one exchange ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timer = timing.DeviceTimer(device, LONGEST_STALL)
        self.samples: list[Sample] = []

    def step(self) -> object:
        raise NotImplementedError

    def wall_and_host(self) -> tuple[float, float]:
        # In training a step follows one of the same model, not another contestant's, after which
        # the host's caches hold none of this one's.
        self.step()
        timing.synchronize(self.device)
        began = time.perf_counter()
        self.step()
        host = time.perf_counter() - began
        for _ in range(IN_A_ROW - 1):
            self.step()
        timing.synchronize(self.device)
        return (time.perf_counter() - began) / IN_A_ROW, host


def sample(own: Timed, ranks: Ranks) -> str | None:
    """Adds a sample, or returns the error."""
    ranks.align()
    times, error = ranks.attempt(own.wall_and_host)
    if times is None:
        return error
    ranks.align()
    device, error = ranks.attempt(lambda: own.timer(own.step))
    if device is None:
        return error
    every = ranks.gathered((*times, device, own.timer.stall))
    walls, hosts, devices, stalls = zip(*every)
    own.timer.stall = max(stalls)  # else the ranks would wait for the longest
    own.samples.append(Sample(max(walls), max(hosts), min(devices)))
    return None


def rounds(
    timed: dict[Key, Call],
    failures: dict[Key, str],
    ranks: Ranks,
    seconds: float,
    deadline: float,
) -> Iterator[None]:
    """After every round of samples; what fails moves from one dictionary to the other."""
    began = time.monotonic()
    for n in range(MOST_ROUNDS):
        now = time.monotonic()
        enough = n >= FEWEST_ROUNDS and now - began > seconds
        if ranks.decided(enough or (n > 0 and now > deadline)):
            break
        for key, own in [*timed.items()]:
            error = sample(own, ranks)
            if error is not None:
                failures[key] = error
                del timed[key]
        yield


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Document:
    """The file of a part, which the first rank keeps up to date."""

    def __init__(self, part: str, out: Path, seconds: float, ranks: Ranks) -> None:
        self.path, self.ranks = out / f"{part}.json", ranks
        self.content: dict[str, Any] = {
            "part": part,
            "machine": {**machine(), "ranks": ranks.world},
            "seconds": seconds,
            "in_a_row": IN_A_ROW,
            "rows": [],
        }

    def keep(self, rows: list[dict[str, Any]]) -> None:
        self.content["rows"] = rows
        if self.ranks.rank == 0:
            self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def times(row: dict[str, Any]) -> str:
    """The times of a row, as its line in the terminal shows them."""
    low, high = (time * 1e-3 for time in row["quartiles_us"])
    text = f"{row['median_us'] * 1e-3:>9.2f} ms{f'({low:.2f} - {high:.2f})':>20}"
    return f"{text}  device {row['device_us'] * 1e-3:.2f}, host {row['host_us'] * 1e-3:.2f} ms"


def in_group(args: argparse.Namespace, run: Callable[[argparse.Namespace, Ranks], object]) -> None:
    """Runs a part in a process group on ``args.device``, which is there; writes to ``args.out``."""
    start(args.device)
    try:
        ranks = Ranks(args.device)
        if ranks.rank == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            about = {**machine(), "ranks": ranks.world}
            print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
        run(args, ranks)
    finally:
        dist.destroy_process_group()

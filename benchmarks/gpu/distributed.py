"""Training steps on several GPUs, with AdamW: started by torchrun, the repository on the path.

``torchrun --standalone --nproc-per-node=2 benchmarks/gpu/distributed.py --out runs/gpu``

Writes ``distributed.json`` after every round, so that an interrupted run keeps what it has. A
failure is a row with the text of its error, and all ranks agree on it. The cases, in this order:
``gpt`` and ``llama`` under FSDP2, ``tensor_parallel``, and ``llama_on_one``, the same model on each
GPU by itself. ``--device cpu`` rehearses over gloo with tiny sizes: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from benchmarks import timing
from benchmarks.gpu import peers
from benchmarks.gpu.distributed_models import CASES, ON_ONE, Contest, Entry, Setting, Training
from benchmarks.gpu.problem import STEP, Row
from benchmarks.machine import machine

PART = "distributed"
TIMEOUT = timedelta(seconds=60)
BUDGET = 170.0  # seconds of a run
LEFT_TO_COMPILE = 40.0  # seconds without which torch.compile is not begun
FEWEST_ROUNDS, MOST_ROUNDS = 5, 50
IN_A_ROW = 3  # steps of a sample of wall time
LONGEST_STALL = 0.15  # seconds; the host of a sharded model is slow
CHECKED = 3  # steps that are compared before anything is timed
RATE = 1e-4  # of these steps; 0 afterwards, so that parameters keep their values
# Largest relative difference of a loss of these steps, and of the norm of the first gradients. In
# FP8, E5M2 rounds a gradient by up to an eighth.
LOSSES, NORMS = {False: 0.01, True: 0.03}, {False: 0.05, True: 0.2}

Result = TypeVar("Result")


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
        wall: of several in a row, host and device together; of the slowest rank.
        host: until the calls of one return; of the slowest rank.
        device: between two events behind a stall, so that the host's launches do not count; of the
            rank whose stall ends last, for which no other one has to wait.
    """

    wall: float
    host: float
    device: float


class Contestant:
    """A model, its optimiser, and what was measured of it.

    Methods that compute are called through ``Ranks.attempt`` and leave it to others to agree: a
    rank that fails would be one exchange ahead.
    """

    def __init__(self, entry: Entry, device: torch.device) -> None:
        self.entry, self.device = entry, device
        self.before = allocated(device)
        self.training: Training = entry.build()
        self.optimizer = torch.optim.AdamW(
            self.training.parameters, lr=RATE, fused=device.type == "cuda"
        )
        self.timer = timing.DeviceTimer(device, LONGEST_STALL)
        self.first = First([], 0.0)
        self.peak_bytes: list[int | None] = []
        self.samples: list[Sample] = []

    def forward_backward(self) -> Tensor:
        loss = self.training.loss()
        loss.backward()
        if self.training.summed:
            sum_gradients(self.training)
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward_backward()
        self.update()

    def first_steps(self) -> list[float]:
        """This rank's losses, and the square of the norm of the first gradients."""
        losses = [self.forward_backward()]
        square = squared_norm(self.training)
        self.update()
        for _ in range(CHECKED - 1):
            losses.append(self.forward_backward())
            self.update()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        return torch.stack([*losses, square]).tolist()

    def peak(self) -> int | None:
        """The most bytes that a step holds, with parameters and optimiser; None on a CPU."""
        if self.device.type != "cuda":
            self.step()
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.before

    def wall_and_host(self) -> tuple[float, float]:
        began = time.perf_counter()
        self.step()
        host = time.perf_counter() - began
        for _ in range(IN_A_ROW - 1):
            self.step()
        timing.synchronize(self.device)
        return (time.perf_counter() - began) / IN_A_ROW, host


class First(NamedTuple):
    """Losses of the first steps, means over ranks, and the norm of the first gradients."""

    losses: list[float]
    gradient_norm: float


def begin(entry: Entry, ranks: Ranks) -> tuple[Contestant | None, str | None]:
    """The contestant after its first steps, or an error."""
    own, error = ranks.attempt(lambda: Contestant(entry, ranks.device))
    if own is None:
        return None, error
    figures, error = ranks.attempt(own.first_steps)
    if figures is None:
        return None, error
    *totals, square = (sum(each) for each in zip(*ranks.gathered(figures)))
    own.first = First([total / ranks.world for total in totals], math.sqrt(square))
    peak, error = ranks.attempt(own.peak)
    own.peak_bytes = ranks.gathered(peak)
    if error is None:
        error = sample(own, ranks)  # after which the stall is as long as needed
        own.samples.clear()
    return own, error


def sample(own: Contestant, ranks: Ranks) -> str | None:
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


def allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    if any(placement.is_partial() for placement in gradient.placements):
        gradient = gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
    return gradient.to_local()


def squared_norm(training: Training) -> Tensor:
    """Of this rank's gradients; what is whole on all ranks counts on each."""
    gradients = [local_gradient(p) for p in training.parameters]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return torch.stack(norms).square().sum()


def sum_gradients(training: Training) -> None:
    """Sums what each rank has of its own tokens alone, in one collective."""
    gradients = [p.grad for p in training.summed if p.grad is not None]
    together = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(together)
    parts = together.split([g.numel() for g in gradients])
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients)])


def compared(own: Contestant, reference: Contestant) -> str | None:
    """What is wrong with the first steps, if they are not those of the reference."""
    quantised = own.entry.in_fp8
    (losses, norm), (wanted, wanted_norm) = own.first, reference.first
    norm = abs(norm / wanted_norm - 1)
    differences = [abs(a / b - 1) for a, b in zip(losses, wanted)]
    loss = torch.tensor(differences).max().item()  # NaN if there is one
    if loss <= LOSSES[quantised] and norm <= NORMS[quantised]:
        return None
    return (
        f"AssertionError: losses are off by {loss:.2g} and the norm of the gradients by "
        f"{norm:.2g}; {LOSSES[quantised]:.2g} and {NORMS[quantised]:.2g} are allowed"
    )


def solve(contest: Contest, ranks: Ranks, seconds: float, deadline: float) -> Iterator[list[Row]]:
    """The rows of a contest, anew after every round of samples."""
    contestants: dict[Entry, Contestant] = {}
    failures: dict[Entry, str] = {}
    reference: Contestant | None = None
    for entry in contest.entries:
        left = deadline - time.monotonic()
        if not ranks.decided(left > (LEFT_TO_COMPILE if entry.compiles else 0)):
            failures[entry] = "not run: no time was left"
            continue
        began = time.monotonic()
        made, error = begin(entry, ranks)
        if made is not None and error is None:
            reference = reference or made
            error = compared(made, reference)
        if made is not None and error is None:
            contestants[entry] = made
        else:
            failures[entry] = str(error)
            del made
            clear(ranks.device)
        if ranks.rank == 0:
            taken = time.monotonic() - began
            print(f"  {entry.name} {entry.unit}: {taken:.1f} s to begin", flush=True)
        yield rows(contest, contestants, failures)
    began = time.monotonic()
    for n in range(MOST_ROUNDS):
        now = time.monotonic()
        enough = n >= FEWEST_ROUNDS and now - began > seconds
        if ranks.decided(enough or (n > 0 and now > deadline)):
            break
        for entry, own in [*contestants.items()]:
            error = sample(own, ranks)
            if error is not None:
                failures[entry] = error
                del contestants[entry]
        yield rows(contest, contestants, failures)


def rows(
    contest: Contest, contestants: dict[Entry, Contestant], failures: dict[Entry, str]
) -> list[Row]:
    found = []
    walls = {
        (entry.name, entry.unit): timing.spread([s.wall for s in own.samples])
        for entry, own in contestants.items()
        if own.samples
    }
    first = contest.entries[0].name
    for entry in contest.entries:
        unit = {"unit": entry.unit} if entry.unit else {}
        row: Row = {
            "case": contest.case,
            "size": {"gpus": contest.gpus, **contest.size, **unit},
            "dtype": "bfloat16",
            "pass": STEP,
            "contestant": entry.name,
        }
        own = contestants.get(entry)
        if entry in failures:
            found.append({**row, "failure": failures[entry]})
        elif own is not None and own.samples:
            wall = walls[entry.name, entry.unit]
            row |= figures(contest, own, wall)
            if (first, entry.unit) in walls:
                row["speedup"] = walls[first, entry.unit].median / wall.median
            found.append(row)
    return found


def figures(contest: Contest, own: Contestant, wall: timing.Spread) -> Row:
    device = timing.spread([s.device for s in own.samples])
    host = timing.spread([s.host for s in own.samples])
    units = own.training.units
    peaks = [peak for peak in own.peak_bytes if peak is not None]
    return {
        "median_us": wall.median * 1e6,
        "quartiles_us": [wall.low * 1e6, wall.high * 1e6],
        "samples": wall.samples,
        "device_us": device.median * 1e6,
        "device_quartiles_us": [device.low * 1e6, device.high * 1e6],
        "host_us": host.median * 1e6,
        "host_quartiles_us": [host.low * 1e6, host.high * 1e6],
        "units": units,
        "host_us_per_unit": host.median * 1e6 / units,
        "tokens_per_s": contest.tokens / wall.median,
        "peak_bytes": max(peaks, default=None),
        "peak_bytes_of_ranks": own.peak_bytes,
        **own.first._asdict(),
    }


def warm_up(device: torch.device) -> None:
    """Has the GEMM library take its workspaces, so that they count for no contestant."""
    a, b = (torch.randn(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2))  # fmt: skip
    for _ in range(2):
        (a @ b).sum().backward()


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Measures the chosen cases; the first rank keeps the file up to date."""
    deadline = time.monotonic() + args.budget
    setting = Setting(ranks.device, args.layers, not args.no_compile)
    document: dict[str, Any] = {
        "part": PART,
        "machine": {**machine(), "ranks": ranks.world},
        "seconds": args.seconds,
        "in_a_row": IN_A_ROW,
        "rows": [],
    }
    warm_up(ranks.device)
    before: list[Row] = []
    for case in chosen(args.only, ranks):
        contest = CASES[case](setting)
        began = time.monotonic()
        for found in solve(contest, ranks, args.seconds, deadline):
            document["rows"] = before + found
            if ranks.rank == 0:
                text = json.dumps(document, indent=1) + "\n"
                (args.out / f"{PART}.json").write_text(text)
        before = document["rows"]
        torch.compiler.reset()
        clear(ranks.device)
        if ranks.rank == 0:
            for row in found:
                print(line(row), flush=True)
            print(f"{case}: {time.monotonic() - began:.0f} s", flush=True)
    return document


def chosen(only: list[str] | None, ranks: Ranks) -> list[str]:
    """One process by itself has the one case that needs no other."""
    return only or ([*CASES] if ranks.world > 1 else [ON_ONE])


def line(row: Row) -> str:
    size = " ".join(str(value) for value in row["size"].values())
    start = f"{row['case']:<24}{size:<28}{row['contestant']:<30}"
    if "failure" in row:
        return start + row["failure"]
    low, high = (time * 1e-3 for time in row["quartiles_us"])
    text = f"{start}{row['median_us'] * 1e-3:>9.2f} ms{f'({low:.2f} - {high:.2f})':>20}"
    text += f"  device {row['device_us'] * 1e-3:.2f}, host {row['host_us'] * 1e-3:.2f} ms"
    text += f", {row['host_us_per_unit']:.0f} us per unit"
    if row["peak_bytes"] is not None:
        text += f"  {row['peak_bytes'] / 2**30:.2f} GiB"
    if "speedup" in row:
        text += f"  {row['speedup']:.2f} x torch"
    return f"{text}  {row['tokens_per_s'] * 1e-3:.1f} k tokens/s"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--only", nargs="+", choices=CASES, help="cases, all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, help="of Llama 1B, 16 by default")
    parser.add_argument("--seconds", type=float, default=8.0, help="of samples, for each case")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds, of all cases")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("The benchmark on several GPUs was not run: there is no CUDA device.")
        return
    peers.load_cudnn()
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


if __name__ == "__main__":
    main()

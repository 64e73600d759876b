"""Training steps on several GPUs, with AdamW: started by torchrun, the repository on the path.

``torchrun --standalone --nproc-per-node=2 benchmarks/gpu/distributed.py --out runs/gpu``

Writes ``distributed.json`` after every round, so that an interrupted run keeps what it has. A
failure is a row with the text of its error, and all ranks agree on it. The cases, in this order:
``gpt`` and ``llama`` under FSDP2, ``tensor_parallel``, and ``llama_on_one``, the same model on each
GPU by itself. One process without torchrun takes the latter, or cases that ``--only`` names:

``PYTHONPATH=. python benchmarks/gpu/distributed.py --only gpt --no-compile``

``--device cpu`` rehearses over gloo with tiny sizes: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.gpu import peers
from benchmarks.gpu.distributed_contest import Contestant, State, solve, warm_up
from benchmarks.gpu.distributed_models import CASES, ON_ONE
from benchmarks.gpu.distributed_setting import Contest, Setting
from benchmarks.gpu.problem import STEP, Row
from benchmarks.gpu.ranks import Document, Ranks, clear, in_group, times

PART = "distributed"
BUDGET = 170.0  # seconds of a run


def rows(contest: Contest, state: State) -> list[Row]:
    """Of all entries that have failed or have samples."""
    contestants, failures = state
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


def run(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Measures the chosen cases; the first rank keeps the file up to date."""
    deadline = time.monotonic() + args.budget
    setting = Setting(ranks.device, args.layers, not args.no_compile)
    document = Document(PART, args.out, args.seconds, ranks)
    warm_up(ranks.device)
    for case in chosen(args.only, ranks):
        before = document.content["rows"]
        began = time.monotonic()
        found: list[Row] = []
        for found in rows_so_far(CASES[case](setting), ranks, args.seconds, deadline):
            document.keep(before + found)
        torch.compiler.reset()
        clear(ranks.device)
        if ranks.rank == 0:
            for row in found:
                print(line(row), flush=True)
            print(f"{case}: {time.monotonic() - began:.0f} s", flush=True)
    return document.content


def rows_so_far(
    contest: Contest, ranks: Ranks, seconds: float, deadline: float
) -> Iterator[list[Row]]:
    """Keeps the contestants to itself, so that they are gone when the contest is over."""
    for state in solve(contest, ranks, seconds, deadline):
        yield rows(contest, state)


def chosen(only: list[str] | None, ranks: Ranks) -> list[str]:
    """One process by itself has the one case that needs no other."""
    return only or ([*CASES] if ranks.world > 1 else [ON_ONE])


def line(row: Row) -> str:
    size = " ".join(str(value) for value in row["size"].values())
    start = f"{row['case']:<24}{size:<28}{row['contestant']:<30}"
    if "failure" in row:
        return start + row["failure"]
    text = start + times(row)
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
    in_group(args, run)


if __name__ == "__main__":
    main()

"""A layer of experts on several GPUs: started by torchrun, the repository on the path.

``torchrun --standalone --nproc-per-node=2 benchmarks/gpu/expert_parallel.py --out runs/gpu``

Each rank has tokens of its own, and its part of the experts. Writes ``expert_parallel.json`` after
every contestant and every round, so that an interrupted run keeps what it has. Outputs and all
gradients are compared with float64 before anything is timed; a failure is a row with the text of
its error, and all ranks agree on it. "One GPU" is the layer with all experts and the tokens of one
rank, on each GPU by itself: its time over that of several is the efficiency. "Exchange alone" are
the rows of a forward or of a step, sent in equal parts.

``--device cpu`` rehearses over gloo with a tiny size: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import opfuser
from benchmarks import timing
from benchmarks.gpu.distributed_contest import warm_up
from benchmarks.gpu.expert_parallel_layers import (
    EXCHANGE,
    IN_TURN,
    ONE_GPU,
    PASSES,
    SIZES,
    TINY_SIZE,
    Entry,
    Layer,
    entries,
    exchange_alone,
    problem,
)
from benchmarks.gpu.experts import Size, host_waits, with_flops
from benchmarks.gpu.passes import ready
from benchmarks.gpu.problem import REFERENCE, STEP, Options, Problem, Row
from benchmarks.gpu.ranks import (
    Document,
    Ranks,
    Timed,
    clear,
    in_group,
    rounds,
    sample,
    times,
)
from benchmarks.gpu.run import named_number

PART = "expert_parallel"
BUDGET = 400.0  # seconds of a run
LEFT_TO_BEGIN = 30.0  # seconds without which no size is begun


class Pass(Timed):
    """A pass of a contestant."""

    def __init__(self, call: Callable[[], object], device: torch.device) -> None:
        super().__init__(device)
        self.call = call

    def step(self) -> object:
        return self.call()


Begun = dict[str, tuple[Entry, Row]]
Failures = dict[tuple[str, str], str]
Passes = dict[tuple[str, str], Pass]


def begin(made: Layer, entry: Entry, given: Problem, ranks: Ranks) -> tuple[Row | None, str | None]:
    """What is measured besides times, or an error; all ranks compare before one goes on."""
    step = ready(given, entry.function, STEP, made.inputs)
    error, text = ranks.attempt(lambda: made.compare(entry, step))
    if error is None:
        return None, text
    extra, text = ranks.attempt(lambda: timing.extra_bytes(step, ranks.device))
    row: Row = {"error": error, "extra_bytes": extra}
    if text is None and ranks.device.type == "cuda":
        waits, text = ranks.attempt(lambda: host_waits(given, entry.function))
        row["host_waits"] = waits
    return (row, None) if text is None else (None, text)


def begin_all(made: Layer, size: Size, options: Options, ranks: Ranks) -> tuple[Begun, Failures]:
    mesh = init_device_mesh(options.device.type, (ranks.world,))
    begun: Begun = {}
    failures: Failures = {}
    for name, build in entries(made.source, size, options, mesh).items():
        if any(text in name for text in options.without):
            continue
        began = time.monotonic()
        entry, error = ranks.attempt(build)
        row: Row | None = None
        if entry is not None:
            row, error = begin(made, entry, problem(entry, size, options), ranks)
        if entry is None or row is None:
            failures |= dict.fromkeys(((passed, name) for passed in PASSES), str(error))
        else:
            begun[name] = entry, row
        clear(options.device)
        if ranks.rank == 0:
            print(f"  {name}: {time.monotonic() - began:.1f} s to begin", flush=True)
    return begun, failures


def measured(size: Size, options: Options, ranks: Ranks) -> Iterator[list[Row]]:
    """The rows of a size, all that there are so far."""
    made, error = ranks.attempt(lambda: Layer(size, options, ranks))
    if made is None:
        yield [{"pass": "", "contestant": "", "failure": error}]
        return
    made.fullest = max(ranks.gathered(made.fullest))
    begun, failures = begin_all(made, size, options, ranks)
    inputs = made.inputs
    del made  # with float64's results
    clear(options.device)
    about = {name: row for name, (_, row) in begun.items()}
    timed: Passes = {}
    yield rows(timed, failures, about)
    for passed in PASSES:
        own = {(passed, EXCHANGE): Pass(exchange_alone(size, options, passed), options.device)}
        for name, (entry, _) in begun.items():
            call = ready(problem(entry, size, options), entry.function, passed, inputs)
            own[passed, name] = Pass(call, options.device)
        for key, one in [*own.items()]:
            error = sample(one, ranks)  # after which the stall is as long as needed
            one.samples.clear()
            if error is not None:
                failures[key] = error
                del own[key]
        for _ in rounds(own, failures, ranks, options.seconds, options.deadline):
            yield rows({**timed, **own}, failures, about)
        timed |= own


def rows(timed: Passes, failures: Failures, about: dict[str, Row]) -> list[Row]:
    """Of all that has failed or has samples; ``about`` has more of contestants."""
    walls = {key: timing.spread([s.wall for s in p.samples]) for key, p in timed.items()}
    found: list[Row] = [
        {"pass": passed, "contestant": name, "failure": text}
        for (passed, name), text in failures.items()
    ]
    for (passed, name), wall in walls.items():
        samples = timed[passed, name].samples
        device = timing.spread([s.device for s in samples])
        row: Row = {
            "pass": passed,
            "contestant": name,
            "median_us": wall.median * 1e6,
            "quartiles_us": [wall.low * 1e6, wall.high * 1e6],
            "samples": wall.samples,
            "device_us": device.median * 1e6,
            "host_us": timing.spread([s.host for s in samples]).median * 1e6,
            **about.get(name, {}),
        }
        # Of the same recipe; a capacity changes what is computed, not what it is to be.
        plain = name.partition(", capacity")[0].removesuffix(f", {IN_TURN}")
        for other, key in ((REFERENCE, "speedup"), (f"{plain}, {ONE_GPU}", "efficiency")):
            if name != EXCHANGE and (passed, other) in walls and ONE_GPU not in name:
                row[key] = walls[passed, other].median / wall.median
        found.append(row)
    return found


def run(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Measures the chosen sizes; the first rank keeps the file up to date."""
    deadline = time.monotonic() + args.budget
    without = tuple(args.without)
    options = Options(ranks.device, seconds=args.seconds, deadline=deadline, without=without)
    document = Document(PART, args.out, args.seconds, ranks)
    warm_up(ranks.device)
    wanted = dict(args.size)
    for size in [TINY_SIZE] if options.tiny else SIZES:
        if not (options.tiny or wanted.items() <= size.items()):
            continue
        if not ranks.decided(options.tiny or deadline - time.monotonic() > LEFT_TO_BEGIN):
            break
        before, label = document.content["rows"], labels(size, options, ranks)
        for found in measured(size, options, ranks):
            document.keep(before + [labelled(row, label) for row in found])
        clear(ranks.device)
        if ranks.rank == 0:
            for row in document.content["rows"][len(before) :]:
                print(line(row), flush=True)
    return document.content


def labels(size: Size, options: Options, ranks: Ranks) -> Row:
    return {
        "case": "experts, expert parallel",
        "size": {"gpus": ranks.world, **size},
        "dtype": str(options.dtype)[6:],
    }


def labelled(row: Row, label: Row) -> Row:
    row = {**label, **row}
    return row if row["contestant"] == EXCHANGE else with_flops(row)


def line(row: Row) -> str:
    size = " ".join(str(value) for value in row["size"].values())
    start = f"{size:<28}{row['pass']:<9}{row['contestant']:<34}"
    if "failure" in row:
        return start + row["failure"]
    text = start + times(row)
    for key, unit in (
        ("tflops", "TF/s"),
        ("host_waits", "waits"),
        ("speedup", "x torch"),
        ("efficiency", f"of {ONE_GPU}"),
        ("error", "off"),
    ):
        if key in row:
            text += f"  {row[key]:.3g} {unit}"
    return text


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--size",
        nargs="+",
        type=named_number,
        default=(),
        metavar="NAME=NUMBER",
        help="what the sizes to run have, such as tokens=8192",
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of samples, for each pass")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds, of all sizes")
    parser.add_argument(
        "--without",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="parts of the names of contestants that are left out",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("The benchmark on several GPUs was not run: there is no CUDA device.")
        return
    with opfuser.replay("off"):
        in_group(args, run)


if __name__ == "__main__":
    main()

"""Times of the first steps of a model, each contestant in a fresh process.

The compilers' caches on disk are empty there; the device and its GEMM library are initialized
before the first step. The same process, with the usual caches, compiles for another one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import timing
from benchmarks.gpu import replay
from benchmarks.gpu.compiled import COMPILED, compiled
from benchmarks.gpu.passes import ready
from benchmarks.gpu.problem import OURS, REFERENCE, STEP, Case, Options, Row
from benchmarks.gpu.small_problems import ENTRIES, FIRST, Entry

FIRST_STEPS = "first_ten_steps"  # milliseconds
STEPS = 10
CASE = f"{FIRST.name}, first steps"
LONGEST = 120.0  # seconds of a process
ROOT = Path(__file__).parents[2]
MODES = {COMPILED[mode]: mode for mode in COMPILED}


def steps(case: Case, contestant: str, options: Options, count: int = STEPS) -> list[float]:
    """Milliseconds of each of the first steps, with a synchronization after it."""
    torch.manual_seed(0)
    size, _ = case.chosen(options)[0]
    problem = case.make(options, **size)
    modes = (MODES[contestant],) if contestant in MODES else ()
    functions = {**problem.functions, **compiled(problem, modes)}
    step = ready(problem, functions[contestant], STEP, problem.draw())
    square = torch.ones(64, 64, device=options.device, dtype=options.dtype)
    torch.mm(square, square)
    timer = timing.WallTimer(options.device, 1)
    return [timer(step) * 1e3 for _ in range(count)]


def rows(options: Options) -> Iterator[Row]:
    """The first steps of one model, for a few contestants."""
    if not options.runs(CASE):
        return
    size, _ = FIRST.chosen(options)[0]
    label = {"case": CASE, "size": dict(size), "dtype": str(options.dtype)[6:]}
    compiles = options.modes is None or "default" in options.modes
    names = [REFERENCE, *([COMPILED["default"]] if compiles else []), OURS, replay.REPLAYED]
    left_out = replay.left_out(options.device)
    for name in names:
        row = {**label, "pass": "first ten steps", "contestant": name}
        reason = "no time was left" if options.out_of_time() else left_out.get(name)
        if reason is not None:
            yield {**row, "failure": f"not run: {reason}"}
            continue
        times, failure = timing.attempt(lambda name=name: measured(name, options))
        yield {**row, FIRST_STEPS: times} if failure is None else {**row, "failure": failure}


def measured(contestant: str, options: Options) -> list[float]:
    if options.tiny:
        return steps(FIRST, contestant, options)
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        child = start(FIRST, contestant, options, STEPS, caches)
        output, errors = communicate(child, LONGEST)
    if child.returncode:
        raise RuntimeError(" / ".join(errors.strip().splitlines()[-3:]) or "no output")
    times: list[float] = json.loads(output.splitlines()[-1])
    return times


def compile_ahead(entries: list[Entry], options: Options) -> None:
    """Fills the compilers' caches on disk, all models at once; what fails is compiled later."""
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    children = [
        start(entry.case, COMPILED[mode], options, 1, few, subprocess.DEVNULL)
        for entry in entries
        for mode in entry.chosen(options)
    ]
    end = time.monotonic() + LONGEST
    for child in children:
        communicate(child, max(0.0, end - time.monotonic()))


def start(
    case: Case,
    contestant: str,
    options: Options,
    count: int,
    environment: dict[str, str],
    output: int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    words = [case.name, contestant, str(options.device), str(options.dtype)[6:], str(count)]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.first_steps", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=output,
        stderr=output,
        text=True,
    )


def communicate(child: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """The outputs of a process, which is ended if it takes longer."""
    try:
        return child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("case", "contestant", "device", "dtype"):
        parser.add_argument(name)
    parser.add_argument("count", type=int)
    args = parser.parse_args()
    (case,) = [entry.case for entry in ENTRIES if entry.case.name == args.case]
    options = Options(torch.device(args.device), getattr(torch, args.dtype))
    print(json.dumps(steps(case, args.contestant, options, args.count)))


if __name__ == "__main__":
    main()

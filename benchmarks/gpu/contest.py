"""One problem, several contestants: checked against plain PyTorch, then timed in turns."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.gpu.compiled import COMPILED, compiled
from benchmarks.gpu.passes import leaves, ready
from benchmarks.gpu.problem import (
    REFERENCE,
    STEP,
    STEP_AS_GRAPH,
    Case,
    Function,
    Inputs,
    Missing,
    Options,
    Problem,
    Row,
    Within,
)
from benchmarks.gpu.reserved import peak_reserved, reserved
from opfuser.report.bench import saved_bytes

COPY = "copy of as many bytes"
MOST_SETS = 64
EQUAL_COPY = 1 << 31  # bytes; beyond that, the large copy is as good
# Largest norm of a difference, relative to the reference: a bf16 sum of bf16 products has an error
# of some units of 2**-8. tf32 may be on.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def distance(result: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest norm of a difference, relative to the norm of the expected tensor; NaN for NaN."""
    if len(result) != len(wanted):
        raise AssertionError(f"{len(result)} results instead of {len(wanted)}")
    ratios = []
    for own, other in zip(result, wanted):
        if own.shape != other.shape:
            raise AssertionError(f"a result is {tuple(own.shape)}, not {tuple(other.shape)}")
        wide = torch.promote_types(other.dtype, torch.float32)
        size = torch.linalg.vector_norm(other, dtype=wide).item()
        error = torch.linalg.vector_norm(own - other, dtype=wide).item()
        ratios.append(error / size if size else error)
    return math.nan if any(map(math.isnan, ratios)) else max(ratios)


def checker(problem: Problem, reference: Function, options: Options) -> Callable[[Function], Row]:
    """Measures the memory of a contestant that agrees with the reference; else it raises."""
    inputs = problem.draw()
    tolerance = problem.tolerance or TOLERANCE[options.dtype]
    results = ready(problem, reference, STEP, inputs)()
    wanted = [t.detach().clone() for t in problem.observe(results)]
    if problem.exact is not None:
        plain, wanted = wanted, problem.observe(problem.exact(inputs))
        tolerance = max(tolerance, 2 * distance(plain, wanted))
        del plain
    del results

    def check(function: Function) -> Row:
        before = reserved(options.device)
        step = ready(problem, function, STEP, inputs)
        # What tunes itself in backward can be interrupted in this thread alone.
        with torch.autograd.set_multithreading_enabled(False):
            error = distance(problem.observe([t.detach() for t in step()]), wanted)
        if not error <= tolerance:
            raise AssertionError(f"the result is off by {error:.2g}, {tolerance:.2g} is allowed")
        args = leaves(problem, inputs)
        with saved_bytes(problem.parameters) as saved:
            outputs = function(*args)
        kept = saved()
        del outputs, step
        step = ready(problem, function, STEP, inputs)
        extra = timing.extra_bytes(step, options.device)
        peak = peak_reserved(step, options.device)
        return {
            "error": error,
            "saved_bytes": kept,
            "extra_bytes": extra,
            "reserved_bytes": None if peak is None else peak - before,
            **(function.figures() if isinstance(function, Within) else {}),
        }

    return check


class Rotation:
    """Turns of inputs: a set is used again after all others."""

    def __init__(self, problem: Problem, options: Options) -> None:
        first = problem.draw()
        used = (*first.args, *first.grads, *problem.parameters)
        size = sum(t.numel() * t.element_size() for t in used)
        count = min(MOST_SETS, timing.sets_needed(size, options.device))
        self.sets = [first, *(problem.draw() for _ in range(count - 1))]
        self._turn = itertools.count()

    def next(self) -> int:
        return next(self._turn) % len(self.sets)


def sampler(
    problem: Problem,
    prepare: Callable[[Inputs], timing.Call],
    rotation: Rotation,
    timer: Any,
    *,
    spent: bool = False,
) -> Callable[[], float]:
    """Samples of one contestant; what a pass needs is prepared calls ahead, for ``fresh`` anew.

    ``spent``: whether a prepared call can run only once, as a backward.
    """
    calls: dict[int, timing.Call] = {}
    if not problem.fresh:
        calls = {i: prepare(inputs) for i, inputs in enumerate(rotation.sets)}

    def sample() -> float:
        i = rotation.next()
        call = calls.pop(i, None) or prepare(rotation.sets[i])
        seconds: float = timer(call)
        if spent:
            del call
        if not problem.fresh:
            calls[i] = prepare(rotation.sets[i]) if spent else call
        return seconds

    return sample


def timed(
    problem: Problem,
    functions: Mapping[str, Function],
    passed: str,
    options: Options,
    left: Mapping[str, timing.TimeLeft],
) -> tuple[dict[str, timing.Spread], dict[str, str]]:
    rotation = Rotation(problem, options)
    timer: Any = timing.DeviceTimer(options.device)
    if problem.wall is not None:
        timer = timing.WallTimer(options.device, problem.wall)
    samplers: dict[str, Callable[[], float]] = {}
    failures: dict[str, str] = {}
    for name, function in functions.items():
        made, error = left[name].attempt(
            lambda f=function: sampler(
                problem,
                lambda inputs: ready(problem, f, passed, inputs),
                rotation,
                timer,
                spent=passed == "backward",
            )
        )
        if error is None:
            samplers[name] = made
        else:
            failures[name] = error
    nbytes = problem.traffic[passed]
    if nbytes is not None and nbytes < EQUAL_COPY:
        copy = timing.Copy(options.device, nbytes)
        samplers[COPY] = lambda: timer(copy)
    if problem.floor is not None:
        floor = problem.floor
        samplers[problem.floor_name] = sampler(
            problem, lambda inputs: floor(*inputs.args), rotation, timer
        )
    times, more = timing.alternate(samplers, options.seconds, left)
    return {name: timing.spread(own) for name, own in times.items()}, {**failures, **more}


def contest(
    problem: Problem, options: Options, modes: tuple[str, ...], slow: Mapping[str, str] = {}
) -> Iterator[Row]:
    """One row per pass and contestant, as they are measured.

    ``slow`` has contestants that are left out, with the reason.
    """
    functions = {
        name: function
        for name, function in {**problem.functions, **compiled(problem, modes)}.items()
        if name == REFERENCE or not any(text in name for text in options.without)
    }
    missing = {name: f.reason for name, f in functions.items() if isinstance(f, Missing)}
    left_out = {name: f"not run: {reason}" for name, reason in problem.left_out.items()}
    left_out |= missing
    left_out |= {name: slow[name] for name in slow if name in functions and name != REFERENCE}
    for name, text in left_out.items():
        yield from failures(problem, name, text)
    functions = {name: f for name, f in functions.items() if name not in left_out}
    left = {name: timing.TimeLeft(options.limit) for name in functions}
    check = checker(problem, functions[REFERENCE], options)
    memory: dict[str, Row] = {}
    for name, function in functions.items():
        if name in COMPILED.values() and options.out_of_time():
            yield from failures(problem, name, "not run: no time was left")
            continue
        own, error = left[name].attempt(lambda function=function: check(function))
        if error is None:
            memory[name] = own
        else:
            yield from failures(problem, name, error)
    for passed in problem.traffic:
        # What captures CUDA graphs by itself has no place inside one.
        takes_part = {
            name: function
            for name, function in functions.items()
            if name in memory and (passed != STEP_AS_GRAPH or not isinstance(function, Within))
        }
        # After an illegal memory access no call succeeds: whose it was has to be told all the same.
        result, error = timing.attempt(
            lambda own=takes_part, passed=passed: timed(problem, own, passed, options, left)
        )
        times, more = result or ({}, dict.fromkeys(takes_part, error))
        for name, text in more.items():
            yield {"pass": passed, "contestant": name, "failure": text}
        for name in times:
            yield {**figures(problem, passed, name, times), **memory.get(name, {})}


def failures(problem: Problem, name: str, text: str) -> Iterator[Row]:
    for passed in problem.traffic:
        yield {"pass": passed, "contestant": name, "failure": text}


def figures(problem: Problem, passed: str, name: str, times: dict[str, timing.Spread]) -> Row:
    own = times[name]
    row: Row = {
        "pass": passed,
        "contestant": name,
        "median_us": own.median * 1e6,
        "quartiles_us": [own.low * 1e6, own.high * 1e6],
        "samples": own.samples,
    }
    nbytes = problem.traffic[passed]
    if nbytes is not None:
        row["gb_per_s"] = nbytes / own.median * 1e-9
    for other, key in ((COPY, "share_of_equal_copy"), (REFERENCE, "speedup")):
        if other in times:
            row[key] = times[other].median / own.median
    if problem.floor_name in times:
        row["over_floor"] = own.median / times[problem.floor_name].median
    return row


def solve(case: Case, options: Options, modes: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a case as they are measured; a size that fails, or has no time left, is one row.

    Who took too long for one size is not tried with the next.
    """
    slow: dict[str, str] = {}
    for size, with_compile in case.chosen(options) if options.runs(case.name) else ():
        label: Row = {"case": case.name, "size": dict(size), "dtype": str(options.dtype)[6:]}
        if options.out_of_time():
            yield {**label, "pass": "", "contestant": "", "failure": "not run: no time was left"}
            continue
        torch.manual_seed(0)
        for row in attempted(case, size, options, modes if with_compile else (), dict(slow)):
            if str(row.get("failure", "")).startswith("took longer"):
                slow[row["contestant"]] = f"not run: {row['failure']} with another size"
            yield {**label, **row}
        if options.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def attempted(
    case: Case,
    size: Mapping[str, int],
    options: Options,
    modes: tuple[str, ...],
    slow: Mapping[str, str],
) -> Iterator[Row]:
    """The rows of one size, and one of the error that ends them."""

    def measured() -> Iterator[Row]:
        yield from contest(case.make(options, **size), options, modes, slow)

    rows = measured()
    while True:
        row, failure = timing.attempt(lambda: next(rows, None))
        if failure is not None:
            row = {"pass": "", "contestant": "", "failure": failure}
        if row is None:  # also behind an error
            return
        yield row

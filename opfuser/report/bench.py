"""Time and memory of a model with its fusions, without them, and compiled by torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.recorded.functions import tensors_in
from ..errors import TargetError
from ..registry import disable, fusions
from .conversion import no_sequences
from .inputs import said
from .machine import machine
from .target import Target, failed, plans

FUSED, UNFUSED, COMPILED, UNTOUCHED = "fused", "unfused", "torch.compile", "transformers"
_WARM_UP = 3  # steps
_SAMPLE = 0.02  # seconds that a sample takes at least, if 20 steps are enough for that
_MOST_STEPS = 20


class Spread(NamedTuple):
    """Seconds per step: median and quartiles of the samples."""

    median: float
    low: float
    high: float


class Contestant(NamedTuple):
    """One way to run the model.

    Attributes:
        name: which.
        seconds: per step; None if it failed.
        peak: bytes of device memory at the most during a step, besides what is there between
            steps; None on a CPU.
        saved: bytes kept from forward to backward, parameters and buffers left out.
        error: why it failed; empty if it did not.
    """

    name: str
    seconds: Spread | None
    peak: int | None
    saved: int | None
    error: str = ""


class Bench(NamedTuple):
    """What was measured.

    Attributes:
        machine: on which, with versions.
        samples: of each contestant.
        steps: in each sample.
        fused_steps: of the plans that fusions built; without any, nothing is compared.
        backward: whether a step has a backward pass.
        contestants: in the order in which they took turns.
    """

    machine: dict[str, Any]
    samples: int
    steps: int
    fused_steps: int
    backward: bool
    contestants: tuple[Contestant, ...]


def bench(
    target: Target, samples: int = 20, *, compiled: bool = False, forward_only: bool = False
) -> Bench:
    """Times steps of a model with fusions, without, and compiled, in turns.

    A step is a forward pass, and the backward of all outputs that need one; parameters have no
    gradients before it. A sample is so many steps in a row that it takes 20 ms, then the host waits
    for the device; one step before it is not timed, as switching fusions looks plans up again.
    Contestants take turns, sample by sample. A compiled model would be compiled again whenever
    fusions are switched; so then the unfused model has its samples half before and half after the
    others' turns. Where nothing is fused, "fused" does not take part. Models that ``hf:`` names
    take part as transformers computes them, too.

    Args:
        target: the model, on a device with data.
        samples: of each contestant.
        compiled: whether ``torch.compile(model)`` takes part.
        forward_only: leaves the backward out, under ``torch.no_grad()``.

    Raises:
        TargetError: the model is on the meta device, calls no Sequential, or fails.
    """
    tensors = (*target.model.parameters(), *target.inputs)
    if any(t.is_meta for t in tensors) or not target.inputs:
        raise TargetError.explained(
            "A timed model has data and inputs",
            where=target.name,
            received="tensors of the meta device" if target.inputs else "no inputs",
            remedy=f"Use --device cpu{' or cuda' * torch.cuda.is_available()}"
            if target.inputs
            else "Pass --input",
        )
    if samples < 1:
        raise TargetError.explained("At least one sample is taken", received=str(samples))
    with torch.no_grad() if forward_only else nullcontext():
        found = plans(target)
    if not found:
        raise no_sequences(target)
    fused_steps = sum(
        step.fusion is not None for p in found.values() for step in (*p.forward, *p.backward)
    )
    runner = _Runner(target, target.model, forward_only)
    runners = {FUSED: runner, UNFUSED: runner} if fused_steps else {UNFUSED: runner}
    if target.untouched is not None:
        runners[UNTOUCHED] = _Runner(target, target.untouched, forward_only)
    if compiled:
        runners[COMPILED] = _Runner(target, torch.compile(target.model), forward_only)
    run = _Run(runners)
    try:
        steps = _steps_of(runner)
    except Exception as error:
        raise TargetError(failed(target, error)) from error
    others = [name for name in runners if name != UNFUSED]
    half = samples // 2
    if compiled:
        run.rounds([UNFUSED], half, steps)
        run.rounds(others, samples, steps)
        run.rounds([UNFUSED], samples - half, steps)
    else:
        run.rounds(list(runners), samples, steps)
    contestants = tuple(run.contestant(name) for name in runners)
    return Bench(machine(), samples, steps, fused_steps, runner.has_backward, contestants)


class _Runner:
    """Steps of one callable."""

    def __init__(self, target: Target, call: Callable[..., Any], forward_only: bool) -> None:
        self._target, self._call, self._forward_only = target, call, forward_only
        self._grads: list[Tensor] | None = None
        self.device = target.inputs[0].device

    @property
    def has_backward(self) -> bool:
        return bool(self._grads)

    def step(self) -> None:
        for t in (*self._target.model.parameters(), *self._target.inputs):
            t.grad = None
        with torch.no_grad() if self._forward_only else nullcontext():
            made = self._call(*self._target.inputs)
        roots = [t for t in tensors_in(made) if t.requires_grad]
        if self._grads is None:
            self._grads = [torch.randn_like(t) for t in roots]
        del made
        if roots:
            torch.autograd.backward(roots, self._grads)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, steps: int) -> float:
        """Time of one of so many steps in a row."""
        self.wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return (time.perf_counter() - began) / steps

    def peak(self) -> int | None:
        if self.device.type != "cuda":
            return None
        for t in (*self._target.model.parameters(), *self._target.inputs):
            t.grad = None
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.step()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before

    def saved(self) -> int:
        model = self._target.model
        with saved_bytes([*model.parameters(), *model.buffers()]) as count:
            self.step()
        return count()


def _steps_of(runner: _Runner) -> int:
    """How many steps make a sample."""
    for _ in range(_WARM_UP):
        runner.step()
    once = runner.seconds(1)
    return max(1, min(_MOST_STEPS, round(_SAMPLE / once)))


class _Run:
    """The samples of all contestants."""

    def __init__(self, runners: dict[str, _Runner]) -> None:
        self._runners = runners
        self._times: dict[str, list[float]] = {name: [] for name in runners}
        self._memory: dict[str, tuple[int | None, int]] = {}
        self._errors: dict[str, str] = {}

    def rounds(self, names: list[str], count: int, steps: int) -> None:
        for _ in range(count):
            for name in names:
                if name in self._errors:
                    continue
                try:
                    self._times[name].append(self._sample(name, steps))
                except Exception as error:  # noqa: BLE001 - one contestant must not end the run
                    self._errors[name] = said(error)

    def _sample(self, name: str, steps: int) -> float:
        runner = self._runners[name]
        with _switched(name):
            if name not in self._memory:
                for _ in range(_WARM_UP):
                    runner.step()
                self._memory[name] = runner.peak(), runner.saved()
            runner.step()
            return runner.seconds(steps)

    def contestant(self, name: str) -> Contestant:
        if name in self._errors:
            return Contestant(name, None, None, None, self._errors[name])
        return Contestant(name, _spread(self._times[name]), *self._memory[name])


def _switched(name: str) -> AbstractContextManager[Any]:
    if name != UNFUSED:
        return nullcontext()
    return disable(*(info.name for info in fusions() if info.enabled))


def _spread(times: list[float]) -> Spread:
    if len(times) == 1:
        return Spread(times[0], times[0], times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(median, low, high)


@contextmanager
def saved_bytes(leave_out: Iterable[Tensor]) -> Iterator[Callable[[], int]]:
    """Bytes that autograd saves inside: each storage once, without those of ``leave_out``."""
    known = {t.untyped_storage().data_ptr() for t in leave_out}
    # Referring to the storages keeps their addresses unique.
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage
        return t.detach()  # an output that its own node refers to would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield lambda: sum(storage.nbytes() for storage in seen.values())

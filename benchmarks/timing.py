"""Timing: alternating rounds, inputs that are not in the caches, medians.

Device time is measured between two events queued behind a stall, so that it excludes the host's
launches. Wall time is measured around several calls and a synchronization, so that it includes
them.
"""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]

CACHES = 4  # size of the inputs of all turns together, in L2 caches
WARM_UP = 3  # rounds
FEWEST_ROUNDS, MOST_ROUNDS = 5, 100
LONGEST_STALL = 0.05  # seconds
AGAIN = 5.0  # seconds until a call is interrupted once more, as a finalizer drops what it raises


class Spread(NamedTuple):
    """Median and quartiles of samples, in seconds."""

    median: float
    low: float
    high: float
    samples: int


def spread(times: list[float]) -> Spread:
    if len(times) == 1:
        return Spread(times[0], times[0], times[0], 1)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(median, low, high, len(times))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceTimer:
    """Device time per call in seconds; on a CPU, the time of the call."""

    def __init__(self, device: torch.device, longest_stall: float = LONGEST_STALL) -> None:
        self.on_gpu = device.type == "cuda"
        self.stall, self.longest_stall = 1e-3, longest_stall
        if self.on_gpu:
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.cycles_per_second = self._cycles_per_second()

    def _cycles_per_second(self, cycles: int = 10_000_000) -> float:
        for _ in range(10):  # for the clock of an idle device to rise
            self.start.record()
            torch.cuda._sleep(cycles)
            self.end.record()
            torch.cuda.synchronize()
        return cycles / (self.start.elapsed_time(self.end) * 1e-3)

    def __call__(self, call: Call) -> float:
        if not self.on_gpu:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        torch.cuda._sleep(int(self.stall * self.cycles_per_second))
        self.start.record()
        began = time.perf_counter()
        call()
        host = time.perf_counter() - began
        self.end.record()
        torch.cuda.synchronize()
        # A host slower than the stall leaves gaps: the next sample has a longer stall.
        self.stall = min(max(self.stall, 2 * host), self.longest_stall)
        return self.start.elapsed_time(self.end) * 1e-3


class WallTimer:
    """Wall time per call in seconds, host and device together, of ``repeat`` calls in a row."""

    def __init__(self, device: torch.device, repeat: int) -> None:
        self.device, self.repeat = device, repeat

    def __call__(self, call: Call) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(self.repeat):
            call()
        synchronize(self.device)
        return (time.perf_counter() - began) / self.repeat


class HostTimer(WallTimer):
    """Host time per call in seconds; the device time must be shorter."""

    def __call__(self, call: Call) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(self.repeat):
            call()
        return (time.perf_counter() - began) / self.repeat


def attempt(call: Call) -> tuple[Any, str | None]:
    """The result of a call, or its error: one contestant must not end the run."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - other people's code may raise anything
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0]}"[:400]


class _TookTooLong(BaseException):
    """No ``Exception``, which a library might take for a variant that does not compile."""


class TimeLeft:
    """Seconds that a contestant may take in all its calls, so that a slow one costs no other one.

    In the main thread a call is interrupted where it runs Python, as tuning and compiling do. One
    of compiled code, or in another thread, ends by itself, and counts as a failure then.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = self.left = seconds

    def attempt(self, call: Call) -> tuple[Any, str | None]:
        """As ``attempt``; once no time is left, every call fails and says so."""
        began = time.monotonic()
        result = self._within_time(call) if self.left > 0 else None
        self.left -= time.monotonic() - began
        if self.left <= 0 or result is None:
            return None, f"took longer than {self.seconds:g} s"
        return result

    def _within_time(self, call: Call) -> tuple[Any, str | None] | None:
        if self.left == math.inf or threading.current_thread() is not threading.main_thread():
            return attempt(call)

        def interrupt(number: int, frame: object) -> None:
            raise _TookTooLong

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, self.left, AGAIN)
            try:
                return attempt(call)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _TookTooLong:
            return None
        finally:
            signal.signal(signal.SIGALRM, before)


def alternate(
    samplers: dict[str, Callable[[], float]],
    seconds: float,
    left: Mapping[str, TimeLeft] = {},
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The samples of each contestant, one per round, and the errors of those that failed.

    Rounds continue for about ``seconds``. ``left`` is the time of those that have a limit.
    """
    times: dict[str, list[float]] = {name: [] for name in samplers}
    failures: dict[str, str] = {}
    began = time.perf_counter()
    for n in range(WARM_UP + MOST_ROUNDS):
        if n == WARM_UP:
            began = time.perf_counter()
        if n >= WARM_UP + FEWEST_ROUNDS and time.perf_counter() - began > seconds:
            break
        for name, sample in samplers.items():
            if name in failures:
                continue
            taken, error = left[name].attempt(sample) if name in left else attempt(sample)
            if error is not None:
                failures[name] = error
            elif n >= WARM_UP:
                times[name].append(taken)
    return {name: own for name, own in times.items() if name not in failures}, failures


def cache_bytes(device: torch.device) -> int:
    """Size of the L2 cache in bytes; 0 on a CPU, where inputs are not rotated."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def sets_needed(set_bytes: int, device: torch.device) -> int:
    """Number of sets of inputs that together exceed the caches."""
    return max(2, math.ceil(CACHES * cache_bytes(device) / max(1, set_bytes)))


class Copy:
    """A device-to-device copy of ``nbytes / 2``, which is ``nbytes`` of traffic."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        size = -(-nbytes // 1024) * 512  # keeps every copy aligned
        self.places = sets_needed(2 * size, device)
        self.source = torch.randint(256, (self.places, size), dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)
        self.turn = 0

    def __call__(self) -> None:
        self.turn = (self.turn + 1) % self.places
        self.target[self.turn].copy_(self.source[self.turn])


def copy_rate(device: torch.device, seconds: float = 0.5) -> float:
    """Bytes per second, read and written, of a large copy: the meaning of "100 %"."""
    copy = Copy(device, 1 << 31 if device.type == "cuda" else 1 << 20)
    timer = DeviceTimer(device)
    times, _ = alternate({"copy": lambda: timer(copy)}, seconds)
    return 2 * copy.source.shape[1] / statistics.median(times["copy"])


def extra_bytes(call: Call, device: torch.device) -> int | None:
    """Peak device memory of a call in bytes, without its results; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = call()
    held = torch.cuda.memory_allocated(device)
    del results
    return torch.cuda.max_memory_allocated(device) - held

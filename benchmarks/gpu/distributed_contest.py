"""Contestants on several ranks: begun, compared and sampled, with all ranks of one mind."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from benchmarks.gpu.distributed_setting import Contest, Entry, Training
from benchmarks.gpu.ranks import Ranks, Timed, clear, rounds, sample

LEFT_TO_COMPILE = 40.0  # seconds without which torch.compile is not begun
CHECKED = 3  # steps that are compared before anything is timed
RATE = 1e-4  # of these steps; 0 afterwards, so that parameters keep their values
# Largest relative difference of a loss of these steps, and of the norm of the first gradients. In
# FP8, E5M2 rounds a gradient by up to an eighth.
LOSSES, NORMS = {False: 0.01, True: 0.03}, {False: 0.05, True: 0.2}


class Contestant(Timed):
    """A model, its optimiser, and what was measured of it."""

    def __init__(self, entry: Entry, device: torch.device) -> None:
        super().__init__(device)
        self.entry = entry
        self.before = allocated(device)
        self.training: Training = entry.build()
        self.optimizer = torch.optim.AdamW(
            self.training.parameters, lr=RATE, fused=device.type == "cuda"
        )
        self.first = First([], 0.0)
        self.peak_bytes: list[int | None] = []

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


class State(NamedTuple):
    """Of a contest: who takes part, and why others do not."""

    contestants: dict[Entry, Contestant]
    failures: dict[Entry, str]


def solve(contest: Contest, ranks: Ranks, seconds: float, deadline: float) -> Iterator[State]:
    """The same state after each contestant has begun, and after every round of samples."""
    state = contestants, failures = State({}, {})
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
        yield state
    for _ in rounds(contestants, failures, ranks, seconds, deadline):
        yield state


def warm_up(device: torch.device) -> None:
    """Has the GEMM library take its workspaces, so that they count for no contestant."""
    a, b = (torch.randn(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2))  # fmt: skip
    for _ in range(2):
        (a @ b).sum().backward()

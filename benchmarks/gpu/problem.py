"""A problem as data: what to compute, the contestants, and the sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import timing

Row = dict[str, Any]
Result = Any  # an output, or a tuple of them
Function = Callable[..., Result]

REFERENCE = "torch"
OURS = "opfuser"

# Measurements besides "forward" and "backward". Backward by the caller avoids autograd's thread for
# each device, to which it is slow to change.
STEP = "step"
STEP_BY_CALLER = "step, backward by the caller"
STEP_AS_GRAPH = "step, as a CUDA graph"


@dataclass(frozen=True)
class Options:
    """The choices of the command line.

    Attributes:
        seconds: of sampling per measurement.
        modes: of torch.compile, those in ``COMPILED``; None is each part's default.
        deadline: in ``time.monotonic()``, after which no new problem begins.
        only: substrings of the names of the cases to run.
        limit: seconds that a contestant may take for a size, to be checked and timed.
        without: substrings of the names of contestants that are left out.
        size: what the sizes to run have, by name.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    quick: bool = False
    seconds: float = 1.0
    modes: tuple[str, ...] | None = None
    deadline: float = float("inf")
    only: tuple[str, ...] = ("",)
    limit: float = float("inf")
    without: tuple[str, ...] = ()
    size: Mapping[str, int] = field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        """Whether this is a rehearsal on a CPU."""
        return self.device.type != "cuda"

    def runs(self, case: str) -> bool:
        return any(text in case for text in self.only)

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


class Inputs(NamedTuple):
    """Arguments of a call and the gradients of its outputs."""

    args: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """What to compute, and the contestants.

    Attributes:
        draw: draws random inputs.
        functions: contestants by name, ``"torch"`` among them.
        traffic: for each pass to measure, "forward", "backward" or a step of both, the least bytes
            that it has to move; None where memory does not limit it.
        parameters: shared by all contestants; they get gradients.
        floor: from the arguments, a call of the work that no contestant can avoid.
        floor_name: name of that work.
        observe: from the list of outputs and gradients, what is compared.
        tolerance: of the comparison; None is the usual one of the dtype.
        exact: from the arguments, outputs and gradients of a higher precision to compare with; the
            error may then also be twice that of torch. None compares with torch.
        fresh: whether some contestant overwrites its arguments.
        wall: None to measure device time; else wall time, with so many calls per sample.
        after: ends a step, given the gradients of the parameters, which must keep their values.
        input_grads: whether the floating-point arguments get gradients.
        left_out: contestants that cannot take part, with the reason.
    """

    draw: Callable[[], Inputs]
    functions: Mapping[str, Function]
    traffic: Mapping[str, int | None]
    parameters: tuple[nn.Parameter, ...] = ()
    floor: Callable[..., timing.Call] | None = None
    floor_name: str = "bare GEMMs"
    observe: Callable[[list[Tensor]], list[Tensor]] = list
    tolerance: float | None = None
    exact: Callable[[Inputs], list[Tensor]] | None = None
    fresh: bool = False
    wall: int | None = None
    after: Callable[[Sequence[Tensor]], None] | None = None
    input_grads: bool = True
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """A contestant that is not there.

    Attributes:
        reason: what its rows say instead of times.
    """

    reason: str

    def __call__(self, *args: Tensor) -> Result:
        raise RuntimeError(self.reason)


@dataclass(frozen=True)
class Within:
    """A contestant that needs a context around its passes, both of them in a step.

    Attributes:
        context: makes the context of one call.
        figures: further values of its rows, asked after some steps.
    """

    function: Function
    context: Callable[[], AbstractContextManager[Any]]
    figures: Callable[[], Row] = dict

    def __call__(self, *args: Tensor) -> Result:
        with self.context():
            return self.function(*args)


# Largest relative difference of norms where each contestant draws its own random numbers; without
# the factor 1 / (1 - p) it would be larger.
RANDOM_TOLERANCE = 0.1


def norms(results: list[Tensor]) -> list[Tensor]:
    """What to compare where random numbers differ."""
    return [torch.linalg.vector_norm(t, dtype=torch.float32) for t in results]


@dataclass(frozen=True)
class Case:
    """A kind of problem, and its sizes.

    Attributes:
        make: from options and a size, the problem.
        sizes: to measure on a GPU; the first is that of ``--quick``.
        tiny: to rehearse on a CPU.
        compiled: those of ``sizes`` in which torch.compile takes part, as compiling takes long.
    """

    name: str
    make: Callable[..., Problem]
    sizes: tuple[Mapping[str, int], ...]
    tiny: Mapping[str, int]
    compiled: tuple[int, ...] = (0,)

    def chosen(self, options: Options) -> list[tuple[Mapping[str, int], bool]]:
        """The sizes to run, and whether compiled."""
        if options.tiny:
            return [(self.tiny, True)]
        every = [
            (size, i in self.compiled)
            for i, size in enumerate(self.sizes)
            if options.size.items() <= size.items()
        ]
        return every[:1] if options.quick else every

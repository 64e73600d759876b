"""Contestants in torch.compile, specialized to the shapes of a problem."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.problem import OURS, REFERENCE, Function, Problem, Result

# By mode of torch.compile; "opfuser" is opfuser's contestant in the default mode.
COMPILED = {
    "default": "torch.compile",
    "reduce-overhead": "torch.compile reduce-overhead",
    "max-autotune-no-cudagraphs": "torch.compile max-autotune",
    "opfuser": "opfuser, torch.compile",
}


def compiled(problem: Problem, modes: tuple[str, ...]) -> dict[str, Function]:
    """The reference in these modes, and opfuser if they name it; the first call compiles."""
    if not modes:
        return {}
    torch.compiler.reset()  # otherwise one function reaches the limit of recompilations
    return {COMPILED[mode]: compiled_in(mode, problem) for mode in modes}


def compiled_in(mode: str, problem: Problem) -> Function:
    source = problem.functions[OURS if mode == "opfuser" else REFERENCE]
    function: Function = torch.compile(
        source, mode="default" if mode == "opfuser" else mode, dynamic=False, fullgraph=True
    )
    if mode != "reduce-overhead":
        return function

    def step(*args: Tensor) -> Result:
        # Results of the step before may be overwritten from here on.
        torch.compiler.cudagraph_mark_step_begin()
        return function(*args)

    return step

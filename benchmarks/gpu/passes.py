"""The passes of a contestant that are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.gpu.problem import (
    STEP,
    STEP_AS_GRAPH,
    STEP_BY_CALLER,
    Function,
    Inputs,
    Problem,
    Within,
)


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def leaves(problem: Problem, inputs: Inputs) -> tuple[Tensor, ...]:
    """The arguments as leaves of autograd's graph."""
    own = tuple(t.clone() if problem.fresh else t.detach() for t in inputs.args)
    return tuple(t.requires_grad_(problem.input_grads and t.is_floating_point()) for t in own)


def ready(problem: Problem, function: Function, passed: str, inputs: Inputs) -> timing.Call:
    """Runs everything that precedes the pass; the returned function runs the pass.

    It returns outputs and gradients in one list.
    """
    if isinstance(function, Within):
        with function.context():
            call = ready(problem, function.function, passed, inputs)
        return Within(call, function.context)
    args = leaves(problem, inputs)
    wanted = [t for t in (*args, *problem.parameters) if t.requires_grad]

    def forward() -> list[Tensor]:
        return list(tensors(function(*args)))

    def backward(outputs: list[Tensor]) -> list[Tensor]:
        if not wanted:  # of what has no backward
            return outputs
        # Accumulation into .grad would copy gradients that two arguments share.
        gradients = torch.autograd.grad(outputs, wanted, inputs.grads, allow_unused=True)
        if any(gradient is None for gradient in gradients):
            raise AssertionError("a gradient is missing")
        if problem.after is not None:
            problem.after(gradients[len(gradients) - len(problem.parameters) :])
        return [*outputs, *gradients]

    if passed == "forward":
        return forward
    if passed == STEP:
        return lambda: backward(forward())
    if passed == STEP_BY_CALLER:
        return lambda: by_caller(forward(), backward)
    if passed == STEP_AS_GRAPH:
        return as_graph(lambda: backward(forward()))
    held = [forward()]
    return lambda: backward(held.pop())


def by_caller(outputs: list[Tensor], backward: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    """Backward in the calling thread, not in autograd's thread for the device."""
    with torch.autograd.set_multithreading_enabled(False):
        return backward(outputs)


def as_graph(step: timing.Call) -> timing.Call:
    """The step as a CUDA graph, which the host launches once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Otherwise autograd's graph would outlive the capture and bind parameters to its stream.
        results = [t.detach() for t in step()]

    def replay() -> Any:
        graph.replay()
        return results

    return replay

"""Modules, calls and comparisons for tests of traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opfuser.reading.dataflow import Dataflow, Value, map_leaves
from opfuser.reading.tracer import Trace, trace

WIDTH = 8


class Computes(nn.Module):
    """Calls a function with itself and the input; has a linear layer and a buffer."""

    calls = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.calls = 0  # type: ignore[attr-defined]
        self.register_buffer("table", torch.randn(WIDTH))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def given() -> Tensor:
    return torch.randn(3, 5, WIDTH)


def traced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    return trace(Computes(function), args or (given(),), kwargs)


def ops(found: Trace) -> list[str]:
    return [node.op for node in found.dataflow.nodes]


def effects(found: Trace) -> list[tuple[str, str]]:
    """The effects of a trace, each with its place."""
    return [(node.effect, node.place) for node in found.dataflow.nodes if node.effect]


def recomputed(flow: Dataflow, *inputs: Tensor) -> Any:
    """The result of a dataflow, computed node by node from real tensors."""
    values: dict[Value, Any] = dict(zip(flow.inputs, inputs))

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        return values.get(leaf, leaf.real)

    for node in flow.nodes:
        result = node.function(*map_leaves(real, node.args), **map_leaves(real, node.kwargs))
        found: list[Tensor] = []
        map_leaves(lambda t, into=found: into.append(t) if isinstance(t, Tensor) else None, result)
        values.update(zip(node.results, found))
    return map_leaves(real, flow.result)

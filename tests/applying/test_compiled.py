"""Models under torch.compile: computed by sequences, and traced again as the plain ones are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import opfuser
from opfuser.applying import report

from .models import (
    IDS,
    MODELS,
    WHOLE,
    assert_equal_steps,
    encoder,
    inputs_of,
    llama,
    nano_gpt,
    paths,
    step,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    # The compilers' own use of torch and of Python warns in some versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that notes the graphs that it gets."""

    def __init__(self) -> None:
        self.nodes: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        calls = [n for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
        self.nodes.append([getattr(n.target, "__name__", str(n.target)) for n in calls])
        return graph

    @property
    def sequences(self) -> list[int]:
        """How many of the nodes of each graph are sequences."""
        return [sum("opfuser_applied" in name for name in nodes) for nodes in self.nodes]


class Pair:
    """A model and one like it to which ``apply`` was applied, both compiled."""

    def __init__(self, build: Callable[[], nn.Module], fullgraph: bool = True, **how: Any) -> None:
        self.plain, self.model = build(), build()
        opfuser.apply(self.model)
        self.theirs, self.ours = Graphs(), Graphs()
        self._calls: list[Any] = [
            torch.compile(m, backend=backend, fullgraph=fullgraph, **how)
            for m, backend in ((self.plain, self.theirs), (self.model, self.ours))
        ]

    def check(self, **others: Any) -> None:
        """Asserts that a step of both is equal, and that both were traced as often."""
        models = self.plain, self.model
        theirs, ours = (step(m, c, **others) for m, c in zip(models, self._calls))
        assert_equal_steps(ours, theirs)
        assert_equal_steps(theirs, step(self.plain, **others))
        assert len(self.ours.nodes) == len(self.theirs.nodes)

    def change(self, change: Callable[[Any], Any]) -> None:
        for m in (self.plain, self.model):
            change(m)


NO_CACHE = {"use_cache": False}


def call_of(name: str) -> dict[str, Any]:
    return NO_CACHE if name in ("Llama", "Qwen3", "GPT-2") else {}


@pytest.mark.parametrize("called", [False, True], ids=["compiled", "called before"])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_are_in_the_graph(name: str, called: bool) -> None:
    pair = Pair(MODELS[name])
    others = call_of(name)
    if called:
        step(pair.model, **others)
    pair.check(**others)
    pair.check(**others)
    assert pair.ours.sequences == [len(WHOLE[name])]
    assert len(pair.ours.nodes[0]) < len(pair.theirs.nodes[0])
    assert paths(report(pair.model)) == WHOLE[name]

"""The recorded backward pass of a recorded forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.buffer_reuse import references
from ...runtime.recording import Assumptions, recorded
from ...torch_internals import memory_of
from ..autograd import separate
from ..passes import execute_backward
from ..program import Program
from .graphs import Graph


class Forwarded(NamedTuple):
    """What a forward pass left: all that :func:`execute_backward` reads of a context."""

    saved_tensors: Sequence[Tensor | None]
    forwarded: tuple[Program, Sequence[Any], bool, bool, None, None]


class BackwardGraph:
    """The recorded backward pass for one choice of gradients that came in.

    Args:
        graph: records it.
        forwarded: by the forward pass, in memory that outlives a pass.
        memory: all of that.
        received: gradients like those to come.

    Attributes:
        received: where they are copied to.
        grads: of input, parameters and extra inputs.
        handed_out: positions of the gradients that callers get without a copy, of parameters.
        copied: of the others.
        storages, references: addresses of the memory of those handed out, and the numbers of
            references while nobody else has any.
    """

    def __init__(
        self,
        graph: Graph,
        forwarded: Forwarded,
        memory: Sequence[Tensor | None],
        received: Sequence[Tensor | None],
    ) -> None:
        device = next(g.device for g in received if g is not None)
        with torch.inference_mode(False):
            self.received = [None if g is None else room_for(g) for g in received]
        self.graph = graph
        self.assumptions = Assumptions(graph.stream(device))

        def backward() -> list[Tensor | None]:
            dy, *dys = self.received
            grads = execute_backward(forwarded, dy, dys, keep=True)
            separate(grads, self.received)
            return grads

        with uncached_casts(), recorded(self.assumptions):
            self.grads = graph.capture(backward)
        count = forwarded.forwarded[0].num_parameters
        tensors = [*self.received, *memory, *self.grads]
        taken = [memory_of(t) for t in tensors if t is not None]
        self.handed_out: list[int] = []
        self.copied: list[int] = []
        self.storages: list[int] = []
        for n, grad in enumerate(self.grads):
            if grad is None:
                continue
            storage = memory_of(grad)
            if 0 < n <= count and taken.count(storage) == 1:
                self.handed_out.append(n)
                self.storages.append(storage)
            else:
                self.copied.append(n)
        self.references = references(self.storages)

    def results(self, *, copies: bool) -> list[Tensor | None]:
        """The gradients, for the caller; all of them as copies if asked for."""
        grads = list(self.grads)
        for n in self.copied:
            grads[n] = grads[n].clone()  # type: ignore[union-attr]
        if not copies:
            for n in self.handed_out:
                grads[n] = grads[n].detach()  # type: ignore[union-attr]
        elif self.handed_out:
            memory = [grads[n] for n in self.handed_out]
            given = [torch.empty_like(grad) for grad in memory]  # type: ignore[arg-type]
            torch._foreach_copy_(given, memory)  # type: ignore[arg-type]
            for n, grad in zip(self.handed_out, given):
                grads[n] = grad
        return grads


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Within it, weights that autocast has cast are not kept: its end would free them."""
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)


def room_for(t: Tensor) -> Tensor:
    """Memory in the layout of ``t``."""
    return torch.empty_like(t, requires_grad=False).copy_(t.detach())

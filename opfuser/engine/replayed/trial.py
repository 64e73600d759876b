"""Measures calls of one kind, as usual and then replayed, and decides between the two.

Nothing waits: events are recorded where a pass begins and ends, and read calls later, when the
device has reached them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ...core.fusion import Refusal
from .decision import Costs, Sample, refusal_after_trial, refusal_before_trial
from .graphs import Event, Graph

# Complete measurements of each way, and calls in which they must come: a forward pass whose
# backward never comes gives none, and a device that lags behind gives them late.
SAMPLES = 5
MOST_CALLS = 40


class _Measured:
    """A call that is measured.

    Attributes:
        following: where the next one begins on the device.
    """

    def __init__(self, graphs: type[Graph], device: torch.device, began: float) -> None:
        self._graphs, self._device = graphs, device
        self._marks = [graphs.event(device)]
        self._began = began
        self._host = 0.0
        self._behind = True
        self._expected = 2
        self.following: Event | None = None

    @property
    def start(self) -> Event:
        return self._marks[0]

    def _end(self) -> None:
        """Ends the pass that began last."""
        self._behind = self._behind and not self._marks[-1].query()
        self._marks.append(self._graphs.event(self._device))
        self._host += perf_counter() - self._began

    def forward_ended(self, node: Any) -> None:
        """Notes the end of the forward pass, and has ``node`` of autograd's graph note backward's.

        Args:
            node: None where no backward pass comes.
        """
        self._end()
        if node is not None:
            self._expected = 4
            node.register_prehook(self._backward_begins)
            node.register_hook(self._backward_ended)

    def _backward_begins(self, grads: Any) -> None:
        # Once, and not in a capture of the caller's, of which no event can be asked for.
        if len(self._marks) == 2 and not self._graphs.under_way():
            self._began = perf_counter()
            self._marks.append(self._graphs.event(self._device))

    def _backward_ended(self, grads: Any, received: Any) -> None:
        if len(self._marks) == 3:
            self._end()

    def sample(self) -> Sample | None:
        """The measurement; None while it is incomplete."""
        marks, following = self._marks, self.following
        if len(marks) < self._expected or following is None:
            return None
        if not (following.query() and all(mark.query() for mark in marks)):
            return None
        spans = [a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2])]
        period = marks[0].elapsed_time(following)
        return Sample(self._host, 1e-3 * sum(spans), self._behind, 1e-3 * period)


class Trial:
    """What is known of the times of one kind of call.

    Attributes:
        refusal: why calls of the kind are not replayed; None as long as there is no reason.
        is_over: whether it is decided.
        copied: bytes of inputs, outputs and gradients.
        memory: bytes that a recording would take, without intermediate results.
    """

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self.is_over = False
        self.copied = self.memory = 0
        self._has_backward = False
        self._usual: list[Sample] | None = None
        self._restart()

    def _restart(self) -> None:
        self._calls = 0
        self._measured: list[_Measured] = []
        self._samples: list[Sample] = []

    @property
    def replays(self) -> bool:
        """Whether calls are to be replayed now."""
        return self._usual is not None

    def refuse(self, refusal: Refusal) -> None:
        """Decides that calls run as usual."""
        self.refusal, self.is_over = refusal, True

    def proceed(self, costs: Callable[[], Costs]) -> None:
        """Decides, at every call, what the measurements that are complete allow to decide.

        Args:
            costs: asked once, before anything is recorded.
        """
        if self.is_over:
            return
        self._calls += 1
        for measured in list(self._measured):
            sample = measured.sample()
            if sample is not None:
                self._measured.remove(measured)
                self._samples.append(sample)
        if len(self._samples) < SAMPLES:
            if self._calls > MOST_CALLS:
                why = "no backward pass was measured, or the device lags far behind"
                self.refuse(Refusal("UNMEASURED", f"{why}: {MOST_CALLS} calls"))
            return
        samples = self._samples
        if self._usual is None:
            no = refusal_before_trial(samples, costs(), has_backward=self._has_backward)
            self._usual = samples
        else:
            no = refusal_after_trial(self._usual, samples)
            self.is_over = True
        self._restart()
        if no is not None:
            self.refuse(no)

    def call(
        self, graphs: type[Graph], tensors: Sequence[Tensor], inputs: int, run: Callable[[], Any]
    ) -> Any:
        """What ``run()`` returns; the call is measured.

        Args:
            graphs: tells events of the device.
            tensors: inputs and parameters of the call.
            inputs: how many of them are inputs.
            run: makes the call, as usual or replayed.
        """
        began, device = perf_counter(), tensors[0].device
        is_first = not self.copied
        before = graphs.allocated(device) if is_first else 0
        measured = _Measured(graphs, device, began)
        if self._measured and self._measured[-1].following is None:
            self._measured[-1].following = measured.start
        self._measured.append(measured)
        results = run()
        outputs = results if isinstance(results, tuple) else (results,)
        node = next((y.grad_fn for y in outputs if y.grad_fn is not None), None)
        measured.forward_ended(node)
        if is_first:
            self._has_backward = node is not None
            self._look(tensors, inputs, outputs, graphs.allocated(device) - before)
        return results

    def _look(
        self, tensors: Sequence[Tensor], inputs: int, outputs: Sequence[Tensor], kept: int
    ) -> None:
        """Notes sizes, and whether a replayed call could return what this one does."""
        memories = {t.untyped_storage().data_ptr() for t in tensors}
        if any(y.untyped_storage().data_ptr() in memories for y in outputs):
            self.refuse(Refusal("VIEW", "an output has memory of an input, and would be a copy"))
        given, returned = (sum(t.nbytes for t in own) for own in (tensors[:inputs], outputs))
        grads = sum(t.nbytes for t in tensors if t.requires_grad)
        self.copied = given + returned
        self.memory = given + max(kept, returned)
        if self._has_backward:
            self.copied += returned + grads
            self.memory += returned + grads

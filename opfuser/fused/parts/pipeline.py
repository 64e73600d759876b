"""The driver of joint fusions: runs the parts in order, and saves or recomputes between them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from ...context import BackwardResult, Contexts, ExtraTensors, ForwardArguments, ForwardResult
from ...op import FusedOperation
from .part import Gradients, Part, no_gradients

__all__ = ["Edge", "Pipeline"]


class Edge(Enum):
    """How backward gets the tensor between two parts.

    SAVE: the part behind saves it. RECOMPUTE: the part before recomputes it. If that part owes no
    gradient, which occurs in no plan, the part behind saves it all the same.
    """

    SAVE = "save"
    RECOMPUTE = "recompute"


class _Place(NamedTuple):
    """A part in a pipeline.

    Attributes:
        part: the part.
        own: position of its operations among all.
        recomputed: whether the edge before it is recomputed.
        early: whether it must be recomputed before any gradient: this part's backward reads it, or
            a later input is recomputed from it.
        late: whether the backward of the part before recomputes it along with its gradients.
    """

    part: Part
    own: slice
    recomputed: bool
    early: bool
    late: bool


class Pipeline(FusedOperation):
    """Abstract. A fused operation of both passes that consists of parts.

    The constructor of a subclass declares the parts and the edges between them.

    Forward runs the parts in order. Backward first recomputes, in order, the inputs that it needs
    from the start, then runs the parts in reverse. Gradients of parameters that a part computes
    apart wait for its input if the kernel of the gradients of the part before recomputes that.

    Args:
        parts: in forward order.
        edges: one between each two parts; by default all are recomputed.

    Raises:
        ValueError: the edges do not fit the parts.
    """

    def __init__(self, parts: Sequence[Part], edges: Sequence[Edge] | None = None) -> None:
        super().__init__(op for part in parts for op in part.ops)
        self.parts = tuple(parts)
        self.edges = (Edge.RECOMPUTE,) * (len(parts) - 1) if edges is None else tuple(edges)
        self._places = _places(self.parts, self.edges)

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        y, owes = input_, False
        extra_outputs: list[Sequence[Tensor | None]] = []
        for part, own, recomputed, *_ in self._places:
            ctxs = basic_op_ctxs[own]
            y, outputs = part.forward(
                ctxs, y, given["basic_op_extra_inputs"][own], save_input=not (recomputed and owes)
            )
            owes = part.owes_gradients(ctxs)
            extra_outputs += outputs
        return y, extra_outputs

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> BackwardResult:
        inputs = self._recomputed_inputs(basic_op_ctxs)
        waiting: _Waiting | None = None
        dy: Tensor | None = grad_output
        parameters: list[Sequence[Gradients]] = []
        extra_inputs: list[Sequence[Gradients]] = []
        for n in reversed(range(len(inputs))):
            place, ctxs, x = self._places[n], basic_op_ctxs[self._places[n].own], inputs.pop()
            part = place.part
            if dy is None:  # the parts left owe no gradient
                grads = no_gradients(ctxs)
                parameters.append(grads.parameters)
                extra_inputs.append(grads.extra_inputs)
                continue
            late = place.late and self._owes(n - 1, basic_op_ctxs)
            own: Sequence[Gradients] | None = None
            if part.parameters_apart and not late:
                own, x = part.parameter_grads(ctxs, dy, x), None
            grads = part.backward(
                ctxs,
                dy,
                x,
                basic_op_grad_extra_outputs[place.own],
                want_output=waiting is not None and waiting.part.wants_input(waiting.ctxs),
            )
            if waiting is not None:
                parameters[-1] = waiting.part.parameter_grads(
                    waiting.ctxs, waiting.dy, grads.output
                )
            waiting = _Waiting(part, ctxs, dy) if late else None
            dy = grads.input
            parameters.append(grads.parameters if own is None else own)
            extra_inputs.append(grads.extra_inputs)
            del grads  # and with it the recomputed output
        if dy is not None and dy.dim() != grad_output.dim():
            dy = dy.view(*grad_output.shape[:-1], dy.shape[-1])
        return dy, _joined(parameters), _joined(extra_inputs)

    def _owes(self, n: int, ctxs: Contexts) -> bool:
        place = self._places[n]
        return place.part.owes_gradients(ctxs[place.own])

    def _recomputed_inputs(self, ctxs: Contexts) -> list[Tensor | None]:
        """For each part its input, if it is recomputed before any gradient, else None."""
        x: Tensor | None = None
        inputs = [x]
        for n, place in enumerate(self._places[1:]):
            before = self._places[n]
            recompute = place.early and self._owes(n, ctxs)
            x = before.part.recompute(ctxs[before.own], x) if recompute else None
            inputs.append(x)
        return inputs


class _Waiting(NamedTuple):
    """A part whose gradients of parameters wait for its input, and their other operands."""

    part: Part
    ctxs: Contexts
    dy: Tensor


def _joined(of_parts: list[Sequence[Gradients]]) -> list[Gradients]:
    """The gradients of all operations in forward order, given those of the parts in reverse."""
    return [grads for part in reversed(of_parts) for grads in part]


def _places(parts: Sequence[Part], edges: Sequence[Edge]) -> tuple[_Place, ...]:
    if len(edges) != len(parts) - 1:
        raise ValueError(f"{len(parts)} parts have {len(parts) - 1} edges, not {len(edges)}")
    for source, part, edge in zip(parts, parts[1:], edges):
        if edge is Edge.RECOMPUTE and (part.keeps_input or not source.recomputes):
            kinds = f"{type(source).__name__} and {type(part).__name__}"
            raise ValueError(f"The tensor between {kinds} is saved, and cannot be recomputed")
    places: list[_Place] = []
    stop = sum(len(part.ops) for part in parts)
    early = False  # whether the input of the part behind is recomputed before any gradient
    for n in reversed(range(len(parts))):
        part = parts[n]
        recomputed = n > 0 and edges[n - 1] is Edge.RECOMPUTE
        if recomputed:
            early = early or not part.parameters_apart or parts[n - 1].parameters_apart
            parts[n - 1].recomputed = early
        else:
            early = False
        own = slice(stop - len(part.ops), stop)
        places.append(_Place(part, own, recomputed, early, recomputed and not early))
        stop = own.start
    return tuple(reversed(places))

"""The driver of joint fusions: runs the parts in order, and saves or recomputes between them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from ...core.context import (
    BackwardResult,
    Contexts,
    Extras,
    ForwardArguments,
    ForwardResult,
    GradNeeds,
    new_context,
)
from ...core.fusion import Env, QuantizedEdge, Stage
from ...op import BasicOperation, FusedOperation
from ...quantization.quantizers import Quantizer
from ...quantization.watch import is_watched
from ...runtime.tracing import stands_in
from .part import PLAIN, PLAIN_WITH_OUTPUT, Gradients, Part, Wanted, no_gradients


class Edge(Enum):
    """How backward gets the tensor between two parts.

    SAVE: the part behind saves it. RECOMPUTE: the part before recomputes it. The part behind saves
    it all the same if it is small, see :class:`Pipeline`, or if the part before owes no gradient,
    which occurs in no plan.
    """

    SAVE = "save"
    RECOMPUTE = "recompute"


class _Neighbour(NamedTuple):
    """A part that takes quantised operands, beside another one."""

    part: Part
    own: slice
    recomputed: bool


class _Place(NamedTuple):
    """A part in a pipeline.

    Attributes:
        part: the part.
        own: position of its operations among all.
        recomputed: whether the edge before it is recomputed.
        early: whether it must be recomputed before any gradient: this part's backward reads it, or
            a later input is recomputed from it. If not, the backward of the part before recomputes
            it along with its gradients.
        before, behind: the neighbours that take from it what is quantised.
    """

    part: Part
    own: slice
    recomputed: bool
    early: bool
    before: _Neighbour | None
    behind: _Neighbour | None


class Pipeline(FusedOperation):
    """Abstract. A fused operation of both passes that consists of parts.

    The constructor of a subclass declares the parts and the edges between them.

    Forward runs the parts in order. Backward first recomputes, in order, the inputs that it needs
    from the start, then runs the parts in reverse. Gradients of parameters that a part computes
    apart wait for its input if the kernel of the gradients of the part before recomputes that.

    Class attributes:
        small: bytes up to which a recomputed edge on a CPU is saved all the same: recomputing it
            is host overhead. While torch.compile traces, none is.

    Args:
        parts: in forward order.
        edges: one between each two parts; by default all are recomputed.

    Raises:
        ValueError: the edges do not fit the parts.
    """

    # In a step of a GPT block of 64 features and 32 tokens in fp32, 644 us in one thread of an
    # EPYC, 22 us are two LayerNorms and a GELU that are recomputed for 48 KiB.
    small: ClassVar[int] = 1 << 16

    def __init__(self, parts: Sequence[Part], edges: Sequence[Edge] | None = None) -> None:
        super().__init__(op for part in parts for op in part.ops)
        self.parts = tuple(parts)
        if edges is None:
            edges = (Edge.RECOMPUTE,) * (len(parts) - 1)
        self._places = _places(self.parts, edges)
        self._any_early = any(place.early for place in self._places)

    @property
    def quantized_ops(self) -> Sequence[BasicOperation]:
        return [op for part in self.parts for op in part.quantized_ops]

    @property
    def emits_quantized(self) -> bool:  # type: ignore[override]
        return self.parts[-1].emits_quantized

    @property
    def emits_quantized_grad(self) -> bool:  # type: ignore[override]
        return self.parts[0].emits_quantized_grad

    def takes_quantized(self, env: Env, needs: Sequence[GradNeeds | None]) -> Quantizer | None:
        return self.parts[0].input_quantizer(_contexts(needs), save_input=True)

    def takes_quantized_grad(self, env: Env, needs: Sequence[GradNeeds | None]) -> Quantizer | None:
        last = self._places[-1]
        return last.part.grad_output_quantizer(_contexts(needs)[last.own])

    def quantized_edges(self, env: Env, needs: Sequence[GradNeeds | None]) -> list[QuantizedEdge]:
        ctxs = _contexts(needs)
        edges = []

        def label(stage: Stage, ends: tuple[int, int], quantizer: Quantizer | None) -> None:
            if quantizer is not None:
                edges.append(QuantizedEdge(stage, ends[0], ends[1], *quantizer.kind))

        for place in self._places:
            own, saves = ctxs[place.own], not place.recomputed
            saved = place.part.saved_dtype(own) if saves else None
            if saved is not None:
                at = place.own.stop - 1
                edges.append(QuantizedEdge("joint", at, at, saved, True, False))
        for source, place in pairwise(self._places):
            ends = place.own.start - 1, place.own.start
            if source.behind is not None:
                label("forward", ends, self._input_quantizer(source.behind, ctxs))
            before = place.before
            if before is not None and needs[before.own.start] is not None:
                wanted = before.part.grad_output_quantizer(ctxs[before.own])
                label("backward", ends[::-1], wanted)
        return edges

    @staticmethod
    def _input_quantizer(behind: _Neighbour, ctxs: Contexts) -> Quantizer | None:
        """In forward, how the part behind wants its input."""
        own = ctxs[behind.own]
        saves = not (behind.recomputed and own[0].needs.input)
        return behind.part.input_quantizer(own, save_input=saves)

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        y: Any = input_
        extra_outputs: list[Sequence[Tensor | None]] = []
        last: tuple[Part, Contexts] | None = None
        for part, own, recomputed, early, _, behind in self._places:
            ctxs = basic_op_ctxs[own]
            save_input = True
            if recomputed and ctxs[0].needs.input:
                save_input = ctxs[0].input_saved = not part.quantized_ops and self._is_small(y)
                if last is not None and not save_input and (early or part.wants_input(ctxs)):
                    last[0].hold(last[1])
            last = part, ctxs
            quantizer = None
            # While it is watched, who multiplies by the codes makes them, and tells of them.
            if behind is not None and not is_watched():
                quantizer = self._input_quantizer(behind, basic_op_ctxs)
            elif given["next_op_input_quantizer"] is not None and own.stop == len(basic_op_ctxs):
                quantizer = given["next_op_input_quantizer"]
            extras = given["basic_op_extra_inputs"][own]
            y, outputs = part.forward(ctxs, y, extras, save_input, quantizer)
            extra_outputs += outputs
        return y, extra_outputs

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        inputs = self._recomputed_inputs(basic_op_ctxs) if self._any_early else None
        # The part behind and its place, if the gradients of its parameters wait for its input.
        waiting: tuple[Part, slice, Contexts, Any] | None = None
        dy: Any = grad_output
        parameters: list[Gradients] = [()] * len(basic_op_ctxs)
        extra_inputs = parameters.copy()
        for part, span, recomputed, early, before, behind in reversed(self._places):
            ctxs, x = basic_op_ctxs[span], inputs.pop() if inputs else None
            if dy is None:  # the parts left owe no gradient
                _, parameters[span], extra_inputs[span], _ = no_gradients(ctxs)
                continue
            waits = recomputed and not early and not _has_input(ctxs)
            own: Sequence[Gradients] | None = None
            if part.parameters_apart and not waits:
                own, x = part.parameter_grads(ctxs, dy, x), None
            want = waiting is not None and waiting[0].wants_input(waiting[2])
            of_dx, of_output = ctxs[0].grad_input_quantizer, None
            if before is not None and not is_watched():
                of_dx = before.part.grad_output_quantizer(basic_op_ctxs[before.own])
            if behind is not None and want and not is_watched():
                of_output = behind.part.recomputed_input_quantizer(basic_op_ctxs[behind.own])
            wanted = PLAIN_WITH_OUTPUT if want else PLAIN
            if of_dx is not None or of_output is not None:
                wanted = Wanted(of_dx, of_output, want)
            dx, grads, extra_inputs[span], output = part.backward(
                ctxs, dy, x, basic_op_grad_extra_outputs[span], wanted
            )
            if waiting is not None:
                parameters[waiting[1]] = waiting[0].parameter_grads(*waiting[2:], output)
            del output
            waiting = None
            if waits:
                waiting = part, span, ctxs, dy
            else:
                parameters[span] = grads if own is None else own
            dy = dx
        if isinstance(dy, Tensor) and dy.dim() != grad_output.dim():
            dy = dy.view(*grad_output.shape[:-1], dy.shape[-1])
        return dy, parameters, extra_inputs

    def _is_small(self, edge: Tensor) -> bool:
        return edge.is_cpu and not stands_in(edge) and edge.nbytes <= self.small

    def _recomputed_inputs(self, ctxs: Contexts) -> list[Tensor | None]:
        """For each part its input, if it is recomputed before any gradient, else None."""
        x: Tensor | None = None
        inputs = [x]
        for before, place in pairwise(self._places):
            needed = place.early and not _has_input(ctxs[place.own])
            x = before.part.recompute(ctxs[before.own], x) if needed else None
            inputs.append(x)
        return inputs


def _contexts(needs: Sequence[GradNeeds | None]) -> Contexts:
    """Contexts of a call to come."""
    return [new_context(need) for need in needs]


def _has_input(ctxs: Contexts) -> bool:
    """In backward, whether a part behind a recomputed edge has saved its input nevertheless."""
    return not ctxs[0].needs.input or ctxs[0].input_saved


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
        places.append(_Place(part, own, recomputed, early, None, None))
        stop = own.start
    places.reverse()
    around = [
        _Neighbour(place.part, place.own, place.recomputed) if place.part.quantized_ops else None
        for place in places
    ]
    return tuple(
        place._replace(
            before=before if place.part.emits_quantized_grad else None,
            behind=behind if place.part.emits_quantized else None,
        )
        for place, before, behind in zip(places, [None, *around], [*around[1:], None])
    )

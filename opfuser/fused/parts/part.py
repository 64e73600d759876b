"""The interface of the parts of a joint fusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...core.context import Contexts, Extras
from ...op import BasicOperation
from ...quantization.quantizers import QuantizedTensor, Quantizer

Value = Tensor | QuantizedTensor
Gradients = tuple[Tensor | None, ...]


class Wanted(NamedTuple):
    """What the neighbours of a part want of its backward.

    Attributes:
        input_grad: how the part before wants the gradient of its output; None: as a tensor.
        output: how the part behind wants its recomputed input; None: as a tensor.
        has_output: whether the output is to be recomputed along with the gradients.
    """

    input_grad: Quantizer | None = None
    output: Quantizer | None = None
    has_output: bool = False


PLAIN = Wanted()
PLAIN_WITH_OUTPUT = Wanted(has_output=True)


class PartGrads(NamedTuple):
    """Gradients of the operations of a part.

    Attributes:
        input: of the part's input; all dimensions but the last may be flattened to one.
        parameters: for each operation those of its parameters.
        extra_inputs: for each operation those of its extra inputs.
        output: the recomputed output of the part, if it was wanted.
    """

    input: Value | None
    parameters: Sequence[Gradients]
    extra_inputs: Sequence[Gradients]
    output: Value | None = None


class Part:
    """Abstract. Consecutive basic operations that are computed together in both passes.

    Methods receive the contexts of these operations, in forward order, and save into them. A method
    that receives no input reads the one that forward saved. Who receives a quantizer may return a
    tensor all the same, and its neighbour quantises it.

    Attributes:
        ops: the operations, in forward order.
        quantized_ops: those of them whose GEMMs take quantised operands.
        recomputed: whether :meth:`recompute` will be called; set by the pipeline.
        emits_quantized: whether the output can be quantised, in forward and where backward
            recomputes it; else no quantizer is given.
        emits_quantized_grad: whether the gradient of the input can be.

    Class attributes:
        keeps_input: whether forward saves the input in any case, so that it need not be recomputed.
        parameters_apart: whether :meth:`parameter_grads` computes the gradients of parameters, and
            alone reads the input, instead of :meth:`backward`, which then recomputes no output.
        recomputes: whether the output can be recomputed in backward.
    """

    keeps_input: ClassVar[bool] = False
    parameters_apart: ClassVar[bool] = False
    recomputes: ClassVar[bool] = True
    ops: tuple[BasicOperation, ...]
    quantized_ops: tuple[BasicOperation, ...] = ()
    recomputed: bool = False
    emits_quantized: bool = False
    emits_quantized_grad: bool = False

    def input_quantizer(self, ctxs: Contexts, *, save_input: bool) -> Quantizer | None:
        """In forward, how the input is wanted; None: as a tensor, as below."""
        return None

    def grad_output_quantizer(self, ctxs: Contexts) -> Quantizer | None:
        """In backward, how the gradient of the output is wanted."""
        return None

    def recomputed_input_quantizer(self, ctxs: Contexts) -> Quantizer | None:
        """How :meth:`parameter_grads` wants the recomputed input."""
        return None

    def saved_dtype(self, ctxs: Contexts) -> torch.dtype | None:
        """Dtype of row codes that forward saves in place of its input; None: it saves a tensor."""
        return None

    def forward(
        self, ctxs: Contexts, x: Any, extras: Extras, save_input: bool, quantizer: Quantizer | None
    ) -> tuple[Any, Extras]:
        """The output, and for each operation its extra outputs.

        Args:
            x: the input; quantised only as :meth:`input_quantizer` says.
            extras: for each operation its extra inputs.
            save_input: whether to save the input; if not, backward receives it.
            quantizer: how the part behind wants the output.
        """
        raise NotImplementedError

    def hold(self, ctxs: Contexts) -> None:
        """In forward, saves what :meth:`recompute` reads and no gradient does, if there is any.

        Called behind :meth:`forward` where backward will need the output again.
        """
        return

    def recompute(self, ctxs: Contexts, x: Tensor | None) -> Tensor:
        """The output of forward for the input ``x``, recomputed in backward."""
        raise NotImplementedError

    def backward(
        self, ctxs: Contexts, dy: Any, x: Tensor | None, grad_extras: Extras, wanted: Wanted
    ) -> PartGrads:
        """The gradients, and the output if it is wanted and costs less than :meth:`recompute`.

        Args:
            dy: gradient of the output; all dimensions but the last may be flattened to one.
            x: the recomputed input, which may be overwritten; None if forward saved it.
            grad_extras: for each operation the gradients of its extra outputs.
        """
        raise NotImplementedError

    def wants_input(self, ctxs: Contexts) -> bool:
        """Whether :meth:`parameter_grads` reads the input."""
        raise NotImplementedError

    def parameter_grads(self, ctxs: Contexts, dy: Any, x: Any) -> list[Gradients]:
        """For each operation the gradients of its parameters, if ``parameters_apart``."""
        raise NotImplementedError


def no_gradients(ctxs: Contexts) -> PartGrads:
    """The gradients of a part that owes none."""
    needs = [ctx.needs for ctx in ctxs]
    return PartGrads(
        None,
        [(None,) * len(need.parameters) for need in needs],
        [(None,) * len(need.extra_inputs) for need in needs],
    )

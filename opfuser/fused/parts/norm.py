"""A norm as a part of a joint fusion."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ...basic.add_extra_input import AddExtraInput
from ...basic.make_extra_output import MakeExtraOutput
from ...basic.norm import Norm
from ...core.context import Contexts, Extras
from ...op import compute_dtype
from ...quantization.quantizers import Quantizer
from .part import Gradients, Part, PartGrads, Wanted


class NormPart(Part):
    """A norm; before it an optional residual sum and an optional MakeExtraOutput of that sum.

    Saves what the norm saves, with the sum as its input, but not the norm's output: the kernel of
    the gradients recomputes it.
    """

    keeps_input: ClassVar[bool] = True

    def __init__(
        self, add: AddExtraInput | None, make_extra: MakeExtraOutput | None, norm: Norm
    ) -> None:
        self.ops = tuple(op for op in (add, make_extra, norm) if op is not None)
        self.add, self.norm = add, norm
        # Else the rows of the norm are not those of a linear operation behind it.
        self.emits_quantized = len(norm.normalized_shape) == 1
        self.tap = None if make_extra is None else len(self.ops) - 2

    def forward(
        self, ctxs: Contexts, x: Any, extras: Extras, save_input: bool, quantizer: Quantizer | None
    ) -> tuple[Any, Extras]:
        y: Any = None
        if self.add is not None:
            (z,) = extras[0]
            assert z is not None
            if self._adds_in_kernel(x, z):
                y, x = self.norm.forward_of_sum(ctxs[-1], x, z, quantizer)
            else:
                x = self.add.reference(x, z)
        if y is None:
            y = self.norm.op_forward(
                ctxs[-1], x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=quantizer
            )
        self.norm.save_amax(ctxs[-1], y)
        return y, self.extra_outputs(x)

    def _adds_in_kernel(self, x: Tensor, z: Tensor) -> bool:
        shape = self.norm.normalized_shape
        fits = x.shape == z.shape and x.shape[-len(shape) :] == shape
        return fits and x.dtype == z.dtype == compute_dtype(x, self.norm)

    def extra_outputs(self, x: Tensor | None) -> Extras:
        """For each operation its extra outputs, given the input ``x`` of the norm."""
        outputs: list[tuple[Tensor | None, ...]] = [()] * len(self.ops)
        if self.tap is not None:
            outputs[self.tap] = (x,)
        return outputs

    def hold(self, ctxs: Contexts) -> None:
        self.norm.hold(ctxs[-1])

    def recompute(self, ctxs: Contexts, x: Tensor | None) -> Tensor:
        return self.norm.recompute(ctxs[-1])

    def backward(
        self, ctxs: Contexts, dy: Tensor, x: Tensor | None, grad_extras: Extras, wanted: Wanted
    ) -> PartGrads:
        g = None if self.tap is None else grad_extras[self.tap][0]
        quantizer = wanted.output
        apart = quantizer is not None
        y: Any
        dx, own, y = self.norm.gradients(ctxs[-1], dy, g, wanted.has_output and not apart)
        if quantizer is not None:
            y = self.norm.recompute_quantized(ctxs[-1], quantizer)
        saved = ctxs[-1].saved_tensors[0]
        if dx is not None and dx.shape != saved.shape:
            dx = dx.view_as(saved)
        before: list[Gradients] = [()] * (len(self.ops) - 1)
        extra_inputs: list[Gradients] = [() if self.add is None else (dx,), *before]
        return PartGrads(dx, [*before, own], extra_inputs, y)

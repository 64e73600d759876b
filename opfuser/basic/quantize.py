"""The place in a sequence where a tensor is rounded to the format of a recipe."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..op import BasicOperation, OperationContext
from ..quantization.quantizers import rounded
from ..quantization.region import active_recipe
from ..recipe import Recipe


class Quantize(BasicOperation):
    r"""Rounds to the format of the recipe in a region of quantized compute; the identity elsewhere.

    .. math:: y = Q(x), \quad dx = Q'(dy)

    Shapes: x and y alike, any; y has the dtype of x.

    A neighboring operation whose GEMMs take codes receives them, with the scales that it keeps.
    Otherwise values are rounded with scales from the tensor itself, one for the tensor or one per
    block of 128.

    Args:
        forward: whether to round the output.
        backward: whether to round the gradient of the input.
    """

    class Settings(NamedTuple):
        forward: bool
        backward: bool

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantize_forward = forward
        self.quantize_backward = backward

    def make_settings(self) -> Quantize.Settings:
        return self.Settings(self.quantize_forward, self.quantize_backward)

    @property
    def emits_quantized(self) -> bool:  # type: ignore[override]
        return self.quantize_forward

    @property
    def emits_quantized_grad(self) -> bool:  # type: ignore[override]
        return self.quantize_backward

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Any:
        ctx.recipe = active_recipe()
        if not self.frozen_settings(ctx).forward:
            return input_
        return _quantized(input_, "input", ctx.recipe, next_op_input_quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Any, tuple[()]]:
        if not self.frozen_settings(ctx).backward:
            return grad_output, ()
        quantizer = ctx.grad_input_quantizer
        return _quantized(grad_output, "grad_output", ctx.recipe, quantizer), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_.clone()


def _quantized(x: Tensor, role: str, recipe: Recipe | None, quantizer: Any | None) -> Any:
    if recipe is None:
        return x
    return rounded(x, role, recipe) if quantizer is None else quantizer(x)

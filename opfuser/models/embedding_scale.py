"""The factor on the rows of a token table, as Gemma has it."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opfuser import BasicOperation
from opfuser.basic._numbers import real_number
from opfuser.op import OperationContext


class EmbeddingScale(BasicOperation):
    """Multiplies by a constant that is rounded to the input's dtype: ``y = round(scale) * x``.

    Gemma multiplies by a tensor of the dtype of its token table: in bf16 by 55.5 in place of
    ``sqrt(3072) = 55.43``, a bias of 0.14 % if it is left out. :class:`opfuser.ConstantScale`
    multiplies by the number itself.

    Args:
        scale: the constant, a real Python number.

    Raises:
        ArgumentTypeError: if ``scale`` is none.
    """

    class Settings(NamedTuple):
        scale: float
        bf16: float
        fp16: float

        def rounded(self, dtype: torch.dtype) -> float:
            """The factor for an input of this dtype; torch rounds it to fp32 by itself."""
            if dtype == torch.bfloat16:
                return self.bf16
            return self.fp16 if dtype == torch.float16 else self.scale

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale: float = scale
        self.scale = self.make_settings().scale

    def make_settings(self) -> EmbeddingScale.Settings:
        scale = real_number(self.scale, "The scale", "EmbeddingScale")
        return self.Settings(scale, _to_bf16(scale), _to_fp16(scale))

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        settings: EmbeddingScale.Settings = self.frozen_settings(ctx)
        return input_.mul(settings.rounded(input_.dtype))

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[()]]:
        if not ctx.needs.input:
            return None, ()
        settings: EmbeddingScale.Settings = self.frozen_settings(ctx)
        return grad_output.mul(settings.rounded(grad_output.dtype)), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.make_settings().rounded(input_.dtype) * input_


# Rounded without torch, under whose modes, such as that of a fake or meta device, a tensor may have
# no value; through fp32, as the tensor of the model is.


def _to_fp16(scale: float) -> float:
    return _rounded(_rounded(scale, "f"), "e")


def _to_bf16(scale: float) -> float:
    """To the nearest number of eight bits, ties to even."""
    single = _rounded(scale, "f")
    if not math.isfinite(single):
        return single
    (bits,) = struct.unpack("I", struct.pack("f", single))
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))[0])


def _rounded(scale: float, code: str) -> float:
    """To a format of ``struct``; infinite where it ends."""
    try:
        return float(struct.unpack(code, struct.pack(code, scale))[0])
    except OverflowError:
        return math.copysign(math.inf, scale)

"""Random zeroing of entries during training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError
from ..kernels.dropout_masks import masked
from ..kernels.philox import draw_seed
from ..kernels.pointwise import draws_seeds, dropout
from ..kernels.pointwise_plain import survivors
from ..op import BasicOperation, OperationContext, OperationGrads
from ._numbers import real_number


class Dropout(BasicOperation):
    """Zeroes entries with probability p and scales the others: ``y = x * mask / (1 - p)``.

    In evaluation, and for p = 0, it is the identity. The gradient is ``dx = dy * mask / (1 - p)``.
    Any shape; the output has the dtype of the input, which must be floating point, also under
    autocast.

    The mask comes from torch's generator of the device, so checkpointing that preserves the
    generator's state draws the same mask again. In kernels it is a function of a seed from that
    generator, the row and the column, and is computed where it is needed; only the seed is saved,
    an int64. On a CPU the mask is drawn and saved, one byte per entry, because recomputing it would
    take longer than reading that byte. No mask is saved if every entry was kept.

    Source: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
    JMLR 2014; random numbers: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.

    Args:
        p: probability of zeroing an entry, from 0 to 1; 1 zeroes all of them.

    Raises:
        ArgumentError: if p is not a probability.
        ArgumentTypeError: if p is not a real Python number.
    """

    kernels = ("Triton pointwise",)

    class Saved(NamedTuple):
        mask: Tensor | None

    class Settings(NamedTuple):
        probability: float
        """That of zeroing an entry: 0 in evaluation."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout_probability: float = real_number(p, "p", "Dropout")
        self.make_settings()

    def make_settings(self) -> Dropout.Settings:
        p = real_number(self.dropout_probability, "p", "Dropout")
        if not 0.0 <= p <= 1.0:
            raise ArgumentError.explained(
                "p must be between 0 and 1", where="Dropout", received=f"p={p}"
            )
        return self.Settings(p if self.training else 0.0)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        output, mask = input_, None
        (p,) = self.frozen_settings(ctx)
        if p > 0:
            if draws_seeds(input_):
                mask = draw_seed(input_)
                output = dropout(input_, mask, p)
            else:
                output, mask = torch.native_dropout(input_, p, True)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(mask))
        return output

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        (mask,) = ctx.saved_tensors
        if mask is None or not ctx.needs.input:
            return grad_output, ()
        (p,) = self.frozen_settings(ctx)
        return masked(grad_output, mask, p), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        (p,) = self.make_settings()
        if not (p > 0 and draws_seeds(input_)):
            return F.dropout(input_, p)
        mask = survivors(input_, draw_seed(input_), p)
        return torch.where(mask, input_ / (1 - p), 0.0) if p < 1 else torch.zeros_like(input_)

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"

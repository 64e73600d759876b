"""Random scaling of entries during training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.context import COMPUTE_DTYPES, refuse_dtype
from ..errors import ArgumentError
from ..op import BasicOperation, OperationContext, OperationGrads
from ._numbers import real_number


class Jitter(BasicOperation):
    """Multiplies each entry by a random factor from 1 - ε to 1 + ε: ``y = x * noise``.

    In evaluation, and for ε = 0, it is the identity. The gradient is ``dx = dy * noise``. Any
    shape; the output has the dtype of the input, also under autocast. The noise is uniform, of
    fp32, from torch's generator of the device, so that checkpointing that preserves its state draws
    it again. It is what is saved. It makes routers of a mixture of experts explore.

    Source: Fedus et al., "Switch Transformers", 2021, section 2.4.

    Args:
        eps: ε, from 0 to 1.

    Raises:
        ArgumentError: if ε is not from 0 to 1.
        ArgumentTypeError: if ε is no real Python number.
        InputError: in forward, if the input is not fp16, bf16, fp32 or fp64.
    """

    class Saved(NamedTuple):
        noise: Tensor | None

    class Settings(NamedTuple):
        eps: float
        """0 in evaluation."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.jitter_eps: float = real_number(eps, "eps", "Jitter")
        self.make_settings()

    def make_settings(self) -> Jitter.Settings:
        eps = real_number(self.jitter_eps, "eps", "Jitter")
        if not 0.0 <= eps <= 1.0:
            raise ArgumentError.explained(
                "eps must be between 0 and 1", where="Jitter", received=f"eps={eps}"
            )
        return self.Settings(eps if self.training else 0.0)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        if input_.dtype not in COMPUTE_DTYPES:
            refuse_dtype(input_, self)
        (eps,) = self.frozen_settings(ctx)
        noise = _noise(input_, eps) if eps else None
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(noise))
        return input_ if noise is None else (input_ * noise).to(input_.dtype)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        (noise,) = ctx.saved_tensors
        if not ctx.needs.input:
            return None, ()
        if noise is None:
            return grad_output, ()
        return (grad_output * noise).to(grad_output.dtype), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        (eps,) = self.make_settings()
        return (input_ * _noise(input_, eps)).to(input_.dtype) if eps else input_.clone()

    def extra_repr(self) -> str:
        return f"eps={self.jitter_eps}"


def _noise(x: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).uniform_(1 - eps, 1 + eps)

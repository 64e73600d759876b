# --8<-- [start:operation]
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opfuser import BasicOperation


class LayerScale(BasicOperation):
    """y = gamma * x, with one learned factor per feature (Touvron et al., CaiT, 2021)."""

    backward_reads_parameters = True

    class Saved(NamedTuple):
        input: Tensor | None

    def __init__(self, size, init=0.1, *, device=None, dtype=None):
        super().__init__()
        self.init = init
        self.gamma = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.gamma, self.init)

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        if ctx.requires_grad:
            wants_gamma = ctx.needs.parameters[0]
            ctx.save_for_backward(*self.Saved(input_ if wants_gamma else None))
        return self.reference(input_)

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        (gamma,) = ctx.parameters
        dx = dgamma = None
        if ctx.needs.input:
            dx = grad_output * gamma.to(grad_output.dtype)
        if ctx.needs.parameters[0]:
            dgamma = (grad_output * x).sum_to_size(gamma.shape)
        return dx, (dgamma,)

    def reference(self, input_, *extra_inputs, **kwargs):
        return input_ * self.gamma.to(input_.dtype)


# --8<-- [end:operation]

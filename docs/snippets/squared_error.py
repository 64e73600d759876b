# --8<-- [start:operation]
from typing import NamedTuple

import torch
from torch import Tensor

from opfuser import BasicOperation, Linear, Sequential
from opfuser.testing import check_op


class SquaredError(BasicOperation):
    """Sum of (x - target)^2 over all elements; the target is an extra input."""

    num_extra_inputs = 1

    class Saved(NamedTuple):
        difference: Tensor

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        (ctx,), ((target,),) = basic_op_ctxs, basic_op_extra_inputs
        difference = input_ - target
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(difference))
        return difference.square().sum(), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (ctx,) = basic_op_ctxs
        (difference,) = ctx.saved_tensors
        dx = 2 * grad_output * difference
        dtarget = -dx if ctx.needs.extra_inputs[0] else None
        return (dx if ctx.needs.input else None), [()], [(dtarget,)]

    def reference(self, input_, target):
        return (input_ - target).square().sum()


check_op(SquaredError(), torch.randn(5, 8), torch.randn(5, 8))
model = Sequential(Linear(4, 8), SquaredError())
loss = model(torch.randn(5, 4), torch.randn(5, 8))
# --8<-- [end:operation]

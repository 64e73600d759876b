# --8<-- [start:fused]
import torch

import opfuser
from opfuser import Bias, FusedOperation, Linear, ReLU, Sequential
from opfuser.testing import check_fusion


@opfuser.fusion(name="bias_relu", stage="joint", pattern=(Bias, ReLU), prepend=True)
class BiasReLU(FusedOperation):
    """y = max(x + b, 0); saves y, which the next operation often saves too, not x + b."""

    def __init__(self, bias, relu):
        super().__init__((bias, relu))

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        bias, relu = self.basic_ops
        y = relu.reference(bias.reference(input_))
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(y)
        return y, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (y,) = basic_op_ctxs[1].saved_tensors
        dx = grad_output * (y > 0)
        needs_bias = any(basic_op_ctxs[0].needs.parameters)
        db = dx.sum_to_size(y.shape[-1:]) if needs_bias else None
        return dx, [(db,), ()], [(), ()]


check_fusion("bias_relu", [Linear(6, 4), ReLU()], torch.randn(5, 6))
# --8<-- [end:fused]

# --8<-- [start:plan]
model = Sequential(Linear(6, 4), ReLU(), Linear(4, 1))
plan = model.plan(torch.randn(5, 6))
print(plan.fused("forward"))
print(plan.fused("backward"))
# --8<-- [end:plan]

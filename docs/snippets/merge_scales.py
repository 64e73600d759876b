# --8<-- [start:fused]
import math

import torch

import opfuser
from opfuser import ConstantScale, FusedOperation, Linear, Repeated, Sequential
from opfuser.testing import check_fusion


class MergedScale(FusedOperation):
    """Any number of ConstantScales in a row, as one multiplication in both passes."""

    def __init__(self, scales):
        super().__init__(scales)

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        factor = basic_op_ctxs[0].factor = math.prod(scale.scale for scale in self.basic_ops)
        return input_ * factor, [()] * len(self.basic_ops)

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        nothing = [()] * len(self.basic_ops)
        return grad_output * basic_op_ctxs[0].factor, nothing, nothing


scales = Repeated("ConstantScale", lambda op: type(op) is ConstantScale, at_least=2)
handle = opfuser.register_forward_backward_fusion(
    opfuser.Fusion(name="merge_scales", stage="joint", pattern=(scales,), build=MergedScale)
)
check_fusion("merge_scales", [ConstantScale(n) for n in (2.0, 0.3, 0.5)], torch.randn(5, 6))
# --8<-- [end:fused]

plan = Sequential(ConstantScale(2.0), ConstantScale(3.0), Linear(4, 4), ConstantScale(5.0)).plan(
    torch.randn(2, 4)
)
assert plan.record("merge_scales").matches == ((0, 1),)

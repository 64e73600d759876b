# --8<-- [start:fused]
import math

import torch

import opfuser
from opfuser import ConstantScale, FusedOperation, Linear, Sequential
from opfuser.testing import check_fusion


class MergedScale(FusedOperation):
    """Any number of ConstantScales in a row, as one multiplication in both passes."""

    def __init__(self, scales):
        super().__init__(scales)
        self.factor = math.prod(scale.scale for scale in scales)

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return input_ * self.factor, [()] * len(self.basic_ops)

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        nothing = [()] * len(self.basic_ops)
        return grad_output * self.factor, nothing, nothing


def merge_scales(ops, *, env):
    out, run = [], []

    def close():
        out.extend([MergedScale(run)] if len(run) > 1 else run)
        run.clear()

    for op in ops:
        if type(op) is ConstantScale:
            run.append(op)
        else:
            close()
            out.append(op)
    close()
    return out


opfuser.register_forward_backward_fusion(merge_scales, name="merge_scales")
check_fusion("merge_scales", [ConstantScale(2.0), ConstantScale(0.3)], torch.randn(5, 6))
# --8<-- [end:fused]

plan = Sequential(ConstantScale(2.0), ConstantScale(3.0), Linear(4, 4), ConstantScale(5.0)).plan(
    torch.randn(2, 4)
)
assert plan.record("merge_scales").matches == ((0, 1),)

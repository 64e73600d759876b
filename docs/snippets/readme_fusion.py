# --8<-- [start:fusion]
import torch

import opfuser
from opfuser import AddExtraInput, ConstantScale, FusedOperation, Linear, Residual


@opfuser.fusion(name="scale_add", stage="forward", pattern=(ConstantScale, AddExtraInput))
class ScaleAdd(FusedOperation):
    def __init__(self, scale, add):
        super().__init__((scale, add))

    def fuser_forward(self, basic_op_ctxs, x, *, basic_op_extra_inputs, **unused):
        (scale, _), (z,) = self.basic_ops, basic_op_extra_inputs[1]
        assert x.shape == z.shape
        return torch.add(z, x, alpha=scale.scale), [(), ()]


block = Residual(Linear(64, 64), ConstantScale(0.1))
plan = block.plan(torch.randn(8, 64, requires_grad=True))
for stage, steps in ("forward", plan.forward), ("backward", plan.backward):
    for step in steps:
        print(stage, step.indices, type(step.op).__name__)
# --8<-- [end:fusion]

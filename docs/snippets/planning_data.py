# --8<-- [start:data]
import torch

from opfuser import Linear, Residual

block = Residual(Linear(64, 64))
plan = block.plan(torch.randn(8, 64, requires_grad=True))
print(plan.fused("forward"))
print(plan.fused("backward"))
print(plan.record("backward_linear_add").matches)
print(plan.record("backward_linear_scale").status)
print(plan.record("forward_linear_scale_add").near_miss)
# --8<-- [end:data]

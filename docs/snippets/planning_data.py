import torch
from opfuser import Linear, Residual

# --8<-- [start:data]
block = Residual(Linear(64, 64))
plan = block.plan(torch.randn(8, 64, requires_grad=True))
print(plan.fused("forward"))
print(plan.fused("backward"))
print(plan.record("backward_linear_add").matches)
print(plan.record("forward_linear_bias_activation").status)
print(plan.record("forward_linear_bias_activation").near_miss.stopped_by)
# --8<-- [end:data]

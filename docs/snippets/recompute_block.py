import torch

# --8<-- [start:block]
from opfuser import GELU, Linear, Residual, RMSNorm

activation = GELU()
activation.recompute_mlp = True
block = Residual(RMSNorm(64), Linear(64, 256), activation, Linear(256, 64))
# --8<-- [end:block]

plan = block.plan(torch.randn(8, 64, requires_grad=True))
assert plan.fused("backward") == {"recompute_mlp_where_asked": 1}

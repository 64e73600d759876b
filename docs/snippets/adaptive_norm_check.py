# --8<-- [start:check]
import torch
from adaptive_norm import Modulate, Normalize

from opfuser import GELU, Linear, Sequential
from opfuser.testing import assert_fused, check_fusion, check_op

x, scale, shift = (torch.randn(5, 8) for _ in range(3))
check_op(Normalize(), x)
check_op(Modulate(), x, scale, shift)
check_fusion("adaptive_norm", [Normalize(), Modulate()], x, scale, shift)
# --8<-- [end:check]

# --8<-- [start:plan]
block = Sequential(Normalize(), Modulate(), Linear(8, 32), GELU(), Linear(32, 8))
x.requires_grad_()
plan = block.plan(x, scale, shift)
print(plan.fused("forward"))
print(plan.why("adaptive_norm"))
assert_fused(block, x, scale, shift, joint={"adaptive_norm": 1})
# --8<-- [end:plan]

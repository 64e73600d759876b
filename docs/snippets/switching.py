# --8<-- [start:switch]
import torch

import opfuser
from opfuser import Linear, Residual

block = Residual(Linear(64, 64))
x = torch.randn(8, 64)
print(block.plan(x).fused("forward"))
with opfuser.disable("forward_linear_bias_add"):
    print(block.plan(x).fused("forward"))
with opfuser.disable("*"):
    print(block.plan(x).fused("forward"))
with opfuser.disable("*"), opfuser.enable("forward_linear_bias_add"):
    print(block.plan(x).fused("forward"))
# --8<-- [end:switch]

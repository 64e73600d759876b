import torch
from opfuser import Linear, Residual

# --8<-- [start:switch]
import opfuser  # noqa: E402

block = Residual(Linear(64, 64))
x = torch.randn(8, 64)
with opfuser.disable("forward_linear_bias_add"):
    print(block.plan(x).fused("forward"))
with opfuser.disable("*"), opfuser.enable("forward_linear_bias_add"):
    print(block.plan(x).fused("forward"))
with opfuser.disable("*"):
    print(block.plan(x).fused("forward"))
# --8<-- [end:switch]

# --8<-- [start:list]
for info in opfuser.fusions():
    print(info.name, info.stage, info.origin, "on" if info.enabled else info.disabled_by)
# --8<-- [end:list]

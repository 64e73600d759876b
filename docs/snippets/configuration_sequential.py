# --8<-- [start:sequential]
import torch

import opfuser
from opfuser import Linear, Residual, Sequential

off = {"forward": {"forward_linear_bias_add": {"enabled": False}}}
model = Sequential(Residual(Linear(64, 64)), Residual(Linear(64, 64)), fusion_config=off)
x = torch.randn(8, 64)
print(model.plan(x).fused("forward"))
model[1].fusion_config = {"forward": {"forward_linear_bias_add": {"enabled": True}}}
print(model.plan(x).fused("forward"))
with opfuser.disable("forward_linear_bias_add"):
    print(model.plan(x).record("forward_linear_bias_add").summary())
# --8<-- [end:sequential]

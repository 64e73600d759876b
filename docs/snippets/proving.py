# --8<-- [start:require]
import torch

import opfuser
from opfuser import LayerNorm, Linear, Residual

model = Residual(LayerNorm(64), Linear(64, 64))
model(torch.randn(8, 64, requires_grad=True)).sum().backward()
opfuser.require_fusions(model, joint={"norm_linear": 1})
# --8<-- [end:require]

# --8<-- [start:missing]
try:
    opfuser.require_fusions(model, joint={"norm_linear": 2}, backward={"backward_linear_add": 1})
except opfuser.errors.MissingFusionError as error:
    print(error)
# --8<-- [end:missing]

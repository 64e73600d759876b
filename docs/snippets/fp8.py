import warnings

import torch

import opfuser
from opfuser import GELU, Linear, Sequential
from opfuser.recipe import DelayedScaling

warnings.filterwarnings("ignore", message="FP8 is emulated")
model = Sequential(Linear(64, 256), GELU(), Linear(256, 10))
x = torch.randn(16, 64)

# --8<-- [start:region]
with opfuser.autocast(recipe=DelayedScaling()):
    loss = model(x).square().mean()
loss.backward()
# --8<-- [end:region]

# --8<-- [start:plan]
plan = model.last_plan
print(plan.quantized)
for index, why in plan.high_precision:
    print(index, why)
# --8<-- [end:plan]
assert plan.quantized == (0,)
assert [(index, why.code) for index, why in plan.high_precision] == [(3, "SHAPE")]

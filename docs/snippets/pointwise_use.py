# --8<-- [start:use]
import torch
from pointwise_swish import Swish

from opfuser import Dropout, Linear, Residual, Sequential

mlp = Residual(Linear(64, 256), Swish(1.5), Dropout(0.1), Linear(256, 64), Dropout(0.1))
model = Sequential(mlp).to("meta")  # a plan needs no data: one for a GPU can be made anywhere
plan = model.plan(torch.empty(32, 64, device="meta", requires_grad=True))
for step in plan.forward:
    print(type(step.op).__name__, [type(plan.basic_ops[i]).__name__ for i in step.indices])
# --8<-- [end:use]

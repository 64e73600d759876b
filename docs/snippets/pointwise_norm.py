# --8<-- [start:norm]
import torch

from opfuser import GELU, Dropout, LayerNorm, Linear, Residual, Sequential


def mlp() -> Sequential:
    return Residual(LayerNorm(64), Linear(64, 256), GELU(), Linear(256, 64), Dropout(0.1))


model = Sequential(mlp(), mlp()).to("meta")
plan = model.plan(torch.empty(32, 64, device="meta", requires_grad=True))
for step in plan.forward:
    print(type(step.op).__name__, [type(plan.basic_ops[i]).__name__ for i in step.indices])
# --8<-- [end:norm]

# --8<-- [start:why]
import torch

from opfuser import LayerNorm, Linear, Residual, Sequential


def block(linear):
    return Residual(LayerNorm(64), linear(64, 64))


layers = Sequential(*(block(torch.nn.Linear if n == 13 else Linear) for n in range(27)))
plan = layers.plan(torch.randn(8, 64, requires_grad=True))
print(plan.why("norm_linear"))
print(plan.why("norm_linear", at=66))
# --8<-- [end:why]

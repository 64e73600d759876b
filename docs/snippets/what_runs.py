# --8<-- [start:program]
import torch

from opfuser import GELU, Linear, Residual, RMSNorm, Sequential

layers = {"norm": RMSNorm(64), "up": Linear(64, 256), "act": GELU(), "down": Linear(256, 64)}
model = Sequential({"mlp": Residual(Sequential(layers))})
x = torch.randn(8, 64, requires_grad=True)
print(model.plan(x).program)
# --8<-- [end:program]

# --8<-- [start:recorded]
import torch

from opfuser import GELU, LayerNorm, Linear, Residual, Sequential

layers = {"norm": LayerNorm(64), "up": Linear(64, 256), "act": GELU(), "down": Linear(256, 64)}
model = Sequential({"mlp": Residual(Sequential(layers))})
x = torch.randn(8, 64, requires_grad=True)
for _ in range(3):
    model(x).square().sum().backward()
print(model.last_plan.recorded)
# --8<-- [end:recorded]

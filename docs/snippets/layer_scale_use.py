# --8<-- [start:use]
import torch
from layer_scale import LayerScale

from opfuser import Linear, Residual, Sequential

alone = LayerScale(8)(torch.randn(5, 8))  # an operation is a module: it runs by itself
model = Sequential(Linear(8, 8), Residual(Linear(8, 8), LayerScale(8)))
model(torch.randn(5, 8)).sum().backward()
print(list(model.state_dict()))
# --8<-- [end:use]

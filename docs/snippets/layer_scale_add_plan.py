import layer_scale_add  # noqa: F401
import torch
from layer_scale import LayerScale
from opfuser import Linear, Residual

# --8<-- [start:plan]
block = Residual(Linear(64, 64), LayerScale(64))
print(block.plan(torch.randn(8, 64)))
# --8<-- [end:plan]

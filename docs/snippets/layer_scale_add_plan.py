import layer_scale_add  # noqa: F401
import torch
from layer_scale import LayerScale

from opfuser import Linear, Residual, Sequential

# --8<-- [start:plan]
model = Sequential(
    Residual(Linear(64, 64), LayerScale(64)),
    Residual(Linear(64, 64), LayerScale(64, dtype=torch.float64)),
)
record = model.plan(torch.randn(8, 64)).record("layer_scale_add")
print(record.status, "at", record.matches)
for at, why in record.refusals:
    print("refused at", at, why)
# --8<-- [end:plan]

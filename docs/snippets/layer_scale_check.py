# --8<-- [start:check]
import torch
from layer_scale import LayerScale
from opfuser.testing import check_op

for dtype in (torch.float32, torch.bfloat16, torch.float64):
    check_op(LayerScale(8, dtype=dtype), torch.randn(5, 8, dtype=dtype), zero_rows=True)
with torch.autocast("cpu", dtype=torch.bfloat16):
    check_op(LayerScale(8), torch.randn(5, 8))
# --8<-- [end:check]

# --8<-- [start:use]
from opfuser import Linear, Residual, Sequential  # noqa: E402

alone = LayerScale(8)(torch.randn(5, 8))  # an operation is a module: it runs by itself
model = Sequential(Linear(8, 8), Residual(Linear(8, 8), LayerScale(8)))
model(torch.randn(5, 8)).sum().backward()
assert set(model.state_dict()) >= {"0.weight", "0.bias", "1.2.gamma"}
# --8<-- [end:use]

# --8<-- [start:check]
import layer_scale_add
import torch
from layer_scale import LayerScale

from opfuser import Linear, Residual
from opfuser.testing import assert_fused, assert_not_fused, check_fusion

block = Residual(Linear(6, 6), LayerScale(6))
x = torch.randn(5, 6)
dtypes = (torch.float32, torch.bfloat16, torch.float64)
check_fusion("layer_scale_add", [block], x, dtypes=dtypes, zero_rows=True)
assert_fused(block, x, forward={"layer_scale_add": 1})
block[2].to(torch.float64)
assert_not_fused(block, "layer_scale_add", x, code="DTYPE")
# --8<-- [end:check]

# --8<-- [start:handle]
layer_scale_add.handle.enabled = False  # off, and on again with True; takes effect at the next call
layer_scale_add.handle.remove()  # gone
# --8<-- [end:handle]

# --8<-- [start:check]
import torch
from layer_scale import LayerScale

from opfuser.testing import check_op

for dtype in (torch.float32, torch.bfloat16, torch.float64):
    check_op(LayerScale(8, dtype=dtype), torch.randn(5, 8, dtype=dtype), zero_rows=True)
with torch.autocast("cpu", dtype=torch.bfloat16):
    check_op(LayerScale(8), torch.randn(5, 8))
# --8<-- [end:check]

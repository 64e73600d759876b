# --8<-- [start:check]
import torch
from pointwise_swish import Swish

from opfuser.testing import check_op

check_op(Swish(1.5), torch.randn(5, 8), dtypes=(torch.float32, torch.bfloat16), zero_rows=True)
# --8<-- [end:check]

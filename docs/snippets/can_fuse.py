# --8<-- [start:ask]
import torch

import opfuser
from opfuser import LayerNorm, Linear

ops = [LayerNorm(64), Linear(64, 64)]
print(opfuser.can_fuse(ops, "norm_linear", torch.empty(8, 64, device="meta")))

ops = [LayerNorm(64), torch.nn.Linear(64, 64)]
answer = opfuser.can_fuse(ops, "norm_linear", torch.empty(8, 64))
print(bool(answer), answer.code)
print(answer.detail)
# --8<-- [end:ask]

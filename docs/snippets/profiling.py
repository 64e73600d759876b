# --8<-- [start:profile]
import torch
from torch.profiler import profile

import opfuser
from opfuser import GELU, Linear, Residual, RMSNorm

mlp = opfuser.Sequential(
    {"norm": RMSNorm(64), "up": Linear(64, 256), "act": GELU(), "down": Linear(256, 64)}
)
model = opfuser.Sequential({"mlp": Residual(mlp), "head": Linear(64, 8)})
x = torch.randn(8, 64, requires_grad=True)
model(x).sum().backward()  # makes the plan

with profile() as found:
    model(x).sum().backward()
ranges = [event for event in found.events() if event.name.startswith("opfuser::")]
for event in sorted(ranges, key=lambda event: event.time_range.start):
    print(event.name)
# --8<-- [end:profile]

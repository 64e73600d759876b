# --8<-- [start:record]
import torch

import opfuser
from opfuser import DotProductAttention, Linear, Residual
from opfuser.events import BytesSaved, FallbackTaken, PlanInvalidated

model = Residual(Linear(64, 192), DotProductAttention(4, softcap=30.0), Linear(64, 64))
x = torch.randn(2, 16, 64)
with opfuser.record_events(only=(BytesSaved, FallbackTaken, PlanInvalidated)) as log:
    model(x).sum().backward()
    model.double()
    model(x.double())
    model.requires_grad_(False)
    model(x.double())
for event in log:
    print(event)
# --8<-- [end:record]

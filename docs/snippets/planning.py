# --8<-- [start:plan]
import torch

from opfuser import Dropout, Linear, Residual, Sequential

model = Sequential(
    Linear(64, 64),
    Residual(Linear(64, 64), Dropout(0.1)),
    torch.nn.GELU(),
    Linear(64, 1, bias=False),
)
x = torch.randn(8, 64)
print(model.plan(x))
# --8<-- [end:plan]

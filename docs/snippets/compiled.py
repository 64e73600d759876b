# --8<-- [start:compile]
import torch
from opfuser import GELU, Linear, Sequential

model = Sequential(Linear(16, 64), GELU(), Linear(64, 1))
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
compiled(torch.randn(8, 16)).sum().backward()
# --8<-- [end:compile]

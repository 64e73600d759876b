import warnings

import torch

from opfuser import GELU, Linear, Sequential

warnings.simplefilter("ignore", DeprecationWarning)  # torch's compiler warns of itself

model = Sequential(Linear(16, 64), GELU(), Linear(64, 1))
x = torch.randn(8, 16)

# --8<-- [start:compile]
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
compiled(x).sum().backward()
# --8<-- [end:compile]

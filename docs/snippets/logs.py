# --8<-- [start:log]
import logging

import torch

from opfuser import Linear, Residual, Sequential

logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
model = Sequential(*(Residual(Linear(64, 64)) for _ in range(4)))
model(torch.randn(8, 64))
# --8<-- [end:log]

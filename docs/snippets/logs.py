# --8<-- [start:log]
import logging

import torch

from opfuser import Linear, Residual, Sequential

logging.basicConfig(level=logging.INFO, format="%(message)s")
quiet = "matches=0 refused=0", "skipped", "disabled"  # for this page
log = logging.getLogger("opfuser")
log.addFilter(lambda record: not any(word in record.getMessage() for word in quiet))
layers = torch.nn.ModuleList(Residual(Linear(64, 64)) for _ in range(4))
x = torch.randn(8, 64, requires_grad=True)
for layer in layers:
    x = layer(x)
Sequential(Linear(64, 1, bias=False))(x)
# --8<-- [end:log]

import torch

from opfuser import Linear, Sequential

# --8<-- [start:checkpoint]
from_te_ops = {
    "0.basic_ops.0.weight": torch.randn(64, 64),
    "0.basic_ops.0._extra_state": torch.empty(0, dtype=torch.uint8),
    "0.basic_ops.1.bias": torch.randn(64),
    "0.basic_ops.1._extra_state": torch.empty(0, dtype=torch.uint8),
}
model = Sequential(Linear(64, 64))
model.load_state_dict(from_te_ops)
print(list(model.state_dict()))
# --8<-- [end:checkpoint]

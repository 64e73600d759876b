# --8<-- [start:where]
import torch

from opfuser import Sequential
from opfuser.models import DecoderConfig, swiglu_block

config = DecoderConfig(vocab_size=256, dim=64, num_layers=1, num_heads=4)
for device in "cpu", "meta":
    model = Sequential(swiglu_block(config), swiglu_block(config)).to(device)
    plan = model.plan(torch.empty(8, 64, device=device, requires_grad=True))
    for step in plan.forward:
        print(
            device, type(step.op).__name__, [type(plan.basic_ops[i]).__name__ for i in step.indices]
        )
# --8<-- [end:where]

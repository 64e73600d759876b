# --8<-- [start:subscribe]
import torch

import opfuser
from opfuser.events import PlanInvalidated

model, x = opfuser.Sequential(opfuser.Linear(64, 64)), torch.randn(8, 64)


def warn(event: opfuser.events.Event) -> None:
    print("A new plan after the warm-up:", event)


model(x)
with opfuser.events.subscribe(warn, only=PlanInvalidated):
    for _ in range(3):
        model(x)
# --8<-- [end:subscribe]

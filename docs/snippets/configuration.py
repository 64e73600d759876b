import os
from pathlib import Path

os.chdir(Path(__file__).parent)
# --8<-- [start:block]
import torch

import opfuser
from opfuser import GELU, LayerNorm, Linear, Sequential


def block(width):
    return Sequential(LayerNorm(64), Linear(64, width), GELU(), Linear(width, 64))


model = Sequential(block(32), block(256), block(256))
x = torch.randn(8, 64, requires_grad=True)
with opfuser.fusion_config("fusions.yaml"):
    for name in ("norm_linear", "activation_linear"):
        record = model.plan(x).record(name)
        print(name, record.status, "at", record.matches)
        for at, why in record.refusals:
            print("  at", at, why)
# --8<-- [end:block]

from __future__ import annotations

import torch

import opfuser

model = opfuser.Sequential(opfuser.RMSNorm(64), opfuser.Linear(64, 128), opfuser.SwiGLU())
x = torch.randn(8, 64)

# --8<-- [start:switch]
overlap = opfuser.overlap_wgrad(model)
model(x).square().mean().backward()
overlap.remove()

with opfuser.overlap_wgrad(model):
    model(x).square().mean().backward()
# --8<-- [end:switch]

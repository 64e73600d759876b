# --8<-- [start:code]
import torch

import opfuser
from opfuser import gemm_providers
from opfuser.recipe import Float8CurrentScaling


def refuses(gemm):
    return "it has no E5M2" if torch.float8_e5m2 in gemm.formats else None


def multiply(a, b, dtype, split):
    y = a.codes.float() @ b.codes.float().t()
    return (y * (a.scale * b.scale)).to(dtype)


gemm_providers.register(gemm_providers.GemmProvider("mine", refuses, multiply))
model = opfuser.Sequential(opfuser.Linear(128, 256, device="meta"))
with opfuser.autocast(recipe=Float8CurrentScaling(gemm="mine")):
    for choice in model.plan(torch.empty(32, 128, device="meta")).gemms:
        print(choice)
# --8<-- [end:code]

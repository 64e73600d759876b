# --8<-- [start:error]
import traceback

import torch

from opfuser import RMSNorm, Sequential
from opfuser.op import BasicOperation


class Clip(BasicOperation):
    def op_forward(self, ctx, input_, **kwargs):
        raise ValueError("no limits are set")


model = Sequential({"norm": RMSNorm(64), "clip": Clip()})
try:
    model(torch.randn(8, 64))
except ValueError as error:
    for frame in traceback.extract_tb(error.__traceback__)[-2:]:
        print(f"in {frame.name}: {frame.line}")
# --8<-- [end:error]

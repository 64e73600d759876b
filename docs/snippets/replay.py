from typing import Any

import torch

import opfuser
from opfuser import GELU, LayerNorm, Linear, Residual, Sequential

device = "cuda" if torch.cuda.is_available() else "cpu"
model = Residual(LayerNorm(64), Linear(64, 256), GELU(), Linear(256, 64)).to(device)
x = torch.randn(16, 64, device=device)

# --8<-- [start:switch]
opfuser.replay("on")

for _ in range(10):
    model(x).square().mean().backward()
# --8<-- [end:switch]
opfuser.replay("off")

# --8<-- [start:plan]
(record,) = model.last_plan.replays
print(record.replayed, record.instances, record.bytes, record.refusal)
# --8<-- [end:plan]
assert (record.replayed > 0) == (device == "cuda")
assert (record.refusal is None) == (device == "cuda")


# --8<-- [start:operation]
class Double(opfuser.BasicOperation):
    replayable = True

    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return 2 * grad_output, ()


# --8<-- [end:operation]
assert torch.equal(Sequential(Double())(x), 2 * x)

# --8<-- [start:caller]
loss = model(x).square().mean()
with torch.autograd.set_multithreading_enabled(False):
    loss.backward()
# --8<-- [end:caller]

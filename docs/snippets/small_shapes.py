import torch

from opfuser import GELU, LayerNorm, Linear, Residual

device = "cuda" if torch.cuda.is_available() else "cpu"
block = Residual(LayerNorm(64), Linear(64, 256), GELU(), Linear(256, 64)).to(device)
x = torch.randn(16, 64, device=device, requires_grad=True)

# --8<-- [start:caller]
loss = block(x).square().mean()
with torch.autograd.set_multithreading_enabled(False):
    loss.backward()
# --8<-- [end:caller]

if device == "cuda":
    # --8<-- [start:graph]
    block = torch.cuda.make_graphed_callables(block, (x,))
    block(x).square().mean().backward()
    # --8<-- [end:graph]
assert x.grad is not None

# --8<-- [start:model]
import torch

from opfuser import GELU, Linear, Residual, RMSNorm, Sequential


def block(width: int) -> Sequential:
    """y = x + down(gelu(up(norm(x))))"""
    up, down = Linear(width, 4 * width), Linear(4 * width, width)
    return Residual(RMSNorm(width), up, GELU(), down)


model = Sequential(Linear(16, 64), block(64), block(64), Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(256, 16)
target = x.square().sum(-1, keepdim=True)
for _ in range(100):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
# --8<-- [end:model]

first = torch.nn.functional.mse_loss(torch.zeros_like(target), target)
assert loss < first / 10, (loss, first)

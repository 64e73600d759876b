# --8<-- [start:model]
from torch import nn


class Block(nn.Module):
    """A feed-forward block whose norm a condition modulates, as in diffusion transformers."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, scale, shift):
        hidden = self.norm(x) * (1 + scale) + shift
        return x + self.down(nn.functional.gelu(self.up(hidden), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, dim=64, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))

    def forward(self, x, scale, shift):
        for block in self.blocks:
            x = block(x, scale, shift)
        return x


# --8<-- [end:model]

import torch

# --8<-- [start:convert]
from torch import nn

import opfuser


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


original = Block(64)
model = opfuser.from_torch(original)
print(model)
# --8<-- [end:convert]

x = torch.randn(2, 10, 64)
torch.testing.assert_close(model(x), original(x))
assert {id(p) for p in model.parameters()} == {id(p) for p in original.parameters()}

# --8<-- [start:masks]
layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True).eval()
padding = torch.arange(10) >= torch.tensor([[10], [4], [7]])
example = {"src": torch.randn(3, 10, 64), "src_key_padding_mask": padding}
masked = opfuser.from_torch(layer, example=example)
# --8<-- [end:masks]
torch.testing.assert_close(masked(**example), layer(**example))

# --8<-- [start:back]
mlp = opfuser.from_torch(original.mlp)
plain = opfuser.to_torch(mlp)  # or mlp.to_torch()
assert plain.state_dict().keys() == original.mlp.state_dict().keys()
# --8<-- [end:back]
assert type(plain) is nn.Sequential

import torch

# --8<-- [start:convert]
from torch import nn

import opfuser


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

    def forward(self, tokens, padding):
        x = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return self.head(x.mean(1))


original = Classifier()
model = opfuser.from_torch(original)
print(opfuser.conversion_report(original))
# --8<-- [end:convert]

tokens = torch.randint(0, 100, (3, 10))
padding = torch.arange(10) >= torch.tensor([[10], [4], [7]])
original.eval()
model.eval()
torch.testing.assert_close(model(tokens, padding), original(tokens, padding))
assert all(a is b for a, b in zip(model.parameters(), original.parameters(), strict=True))

# --8<-- [start:back]
plain = opfuser.to_torch(model)  # or sequence.to_torch()
assert plain.state_dict().keys() == original.state_dict().keys()
# --8<-- [end:back]
assert type(plain.head) is nn.Sequential

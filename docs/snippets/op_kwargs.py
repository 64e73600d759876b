# --8<-- [start:kwargs]
import torch

from opfuser import DotProductAttention, Linear, RotaryEmbedding, Sequential

heads, size = 4, 16
rope = RotaryEmbedding(heads, size)
attention = Sequential(
    Linear(64, 3 * heads * size),  # queries, keys and values of all heads
    rope,
    DotProductAttention(heads, causal=True),
    Linear(heads * size, 64),
)
x = torch.randn(2, 5, 64)  # batch, sequence, features
later = torch.arange(100, 105)
y = attention(x, op_kwargs={rope: {"positions": later}})
# --8<-- [end:kwargs]
torch.testing.assert_close(y, attention(x), rtol=1e-3, atol=1e-4)  # only distances matter

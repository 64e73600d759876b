# --8<-- [start:padding]
import torch

from opfuser import DotProductAttention, KVCache, Linear, Sequential

attention = DotProductAttention(8, num_kv_heads=2, window=128, sinks=True)
model = Sequential(Linear(64, 12 * 8), attention, Linear(64, 64))
x = torch.randn(2, 5, 64)
real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])  # the second row is padded
y = model(x, op_kwargs={attention: {"mask": real}})
# --8<-- [end:padding]

# --8<-- [start:sequences]
packed = torch.cat([x[0], x[1, :3]])[None]  # both sequences in one row, without padding
ends = torch.tensor([0, 5, 8], dtype=torch.int32)
z = model(packed, op_kwargs={attention: {"cu_seqlens": ends, "max_seqlen": 5}})
# --8<-- [end:sequences]
torch.testing.assert_close(z[0], torch.cat([y[0], y[1, :3]]))

# --8<-- [start:cross]
cross = DotProductAttention(8, causal=False, layout="separate")
q, k, v = torch.randn(2, 3, 64), torch.randn(2, 7, 64), torch.randn(2, 7, 64)
out = cross(q, k, v)
# --8<-- [end:cross]
assert out.shape == q.shape

# --8<-- [start:cache]
cache = KVCache()  # KVCache(max_length=4096) for torch.compile
with torch.no_grad():
    prompt = model(x[:, :4], op_kwargs={attention: {"cache": cache}})
    token = model(x[:, 4:], op_kwargs={attention: {"cache": cache}})
# --8<-- [end:cache]
torch.testing.assert_close(torch.cat([prompt, token], 1), model(x))

# --8<-- [start:choice]
model(x, op_kwargs={attention: {"mask": real}})
print(attention.last_choice)
cross(q, k, v)
print(cross.last_choice)
print(*[note for _, note in model.plan(x).notes])
# --8<-- [end:choice]

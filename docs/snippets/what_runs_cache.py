# --8<-- [start:cache]
import torch

from opfuser import DotProductAttention, KVCache, Linear, Sequential

attention = DotProductAttention(4)
model = Sequential(Linear(64, 192), attention, Linear(64, 64))
cache = KVCache(256)
with torch.no_grad():
    for token in torch.randn(3, 1, 1, 64):
        model(token, op_kwargs={attention: {"cache": cache}})
print("\n".join(line for line in model.last_plan.recorded.splitlines() if "cache0" in line))
# --8<-- [end:cache]

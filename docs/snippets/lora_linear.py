import torch

# --8<-- [start:lora]
from opfuser import LoRAAdapter, LoRALinear, RMSNorm, Sequential

adapters = (LoRAAdapter("english", rank=4, scale=2.0), LoRAAdapter("french", rank=4, scale=2.0))
linear = LoRALinear(64, 64, adapters)
block = Sequential(RMSNorm(64), linear)
block(torch.randn(2, 8, 64)).sum().backward()
assert linear.weight.grad is None
assert linear.lora_B_french.grad is not None

linear.adapters = (adapters[0], adapters[1]._replace(active=False))
# --8<-- [end:lora]
block(torch.randn(2, 8, 64))

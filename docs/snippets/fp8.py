import warnings

import torch

import opfuser
from opfuser import GELU, Linear, Sequential
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.recipe import DelayedScaling

warnings.filterwarnings("ignore", message="FP8 is emulated")
model = Sequential(Linear(64, 256), GELU(), Linear(256, 10))
x = torch.randn(16, 64)

# --8<-- [start:region]
with opfuser.autocast(recipe=DelayedScaling()):
    loss = model(x).square().mean()
loss.backward()
# --8<-- [end:region]

# --8<-- [start:plan]
plan = model.last_plan
print(plan.quantized)
for index, why in plan.high_precision:
    print(index, why)
# --8<-- [end:plan]
assert plan.quantized == (0,)
assert [(index, why.code) for index, why in plan.high_precision] == [(3, "SHAPE")]

# --8<-- [start:decoder]
config = DecoderConfig(vocab_size=256, dim=128, num_layers=2, num_heads=2, recipe=DelayedScaling())
decoder = decoder_lm(config)
tokens = torch.randint(256, (2, 33))
decoder(tokens[:, :-1], tokens[:, 1:]).backward()  # no region is needed
# --8<-- [end:decoder]
assert len(decoder.last_plan.quantized) == 8
loss = decoder(tokens[:, :-1], tokens[:, 1:])

# --8<-- [start:save]
with opfuser.autocast(recipe=decoder.recipe):
    state = decoder.state_dict()
# --8<-- [end:save]
resumed = decoder_lm(config)
resumed.load_state_dict(state)
assert torch.equal(resumed(tokens[:, :-1], tokens[:, 1:]), decoder(tokens[:, :-1], tokens[:, 1:]))

# --8<-- [start:watch]
with opfuser.watch_quantization(model) as tensors:
    with opfuser.autocast(recipe=DelayedScaling()):
        loss = model(x).square().mean()
    loss.backward()
for tensor in tensors:
    if tensor.saturated or tensor.underflowed > 0.1 * tensor.elements:
        print(tensor)
# --8<-- [end:watch]
assert {tensor.role for tensor in tensors} == {"input", "weight", "grad_output"}
assert {tensor.operation for tensor in tensors} == {"0"}

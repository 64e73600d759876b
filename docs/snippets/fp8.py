import os
import tempfile
import warnings
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp

import opfuser
from opfuser import GELU, Linear, Sequential
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.recipe import DelayedScaling

warnings.filterwarnings("ignore", message="FP8 is emulated")
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
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


# --8<-- [start:emits]
class Doubled(opfuser.BasicOperation):
    emits_quantized = True

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        y = 2 * input_
        return y if next_op_input_quantizer is None else next_op_input_quantizer(y)

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


model = Sequential(Doubled(), Linear(64, 256))
with opfuser.autocast(recipe=DelayedScaling()):
    model(x).sum().backward()
print(*model.last_plan.edges)
# --8<-- [end:emits]
assert len(model.last_plan.edges) == 1
model = Sequential(Linear(64, 256), GELU(), Linear(256, 10))

# --8<-- [start:decoder]
config = DecoderConfig(vocab_size=256, dim=128, num_layers=2, num_heads=2, recipe=DelayedScaling())
decoder = decoder_lm(config)
tokens = torch.randint(256, (2, 33))
decoder(tokens[:, :-1], tokens[:, 1:]).backward()  # no region is needed
# --8<-- [end:decoder]
assert len(decoder.last_plan.quantized) == 8
loss = decoder(tokens[:, :-1], tokens[:, 1:])

folder = os.path.join(tempfile.mkdtemp(), "checkpoint")
dcp.save({"model": decoder}, checkpoint_id=folder, no_dist=True)
config, recipe = replace(config, recipe=None), config.recipe

# --8<-- [start:resume]
resumed = decoder_lm(config)
opfuser.init_recipe_state(resumed, recipe)
dcp.load({"model": resumed}, checkpoint_id=folder, no_dist=True)
# --8<-- [end:resume]
resumed.recipe = recipe
assert torch.equal(resumed(tokens[:, :-1], tokens[:, 1:]), decoder(tokens[:, :-1], tokens[:, 1:]))

net = torch.nn.Sequential(
    torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
)
# --8<-- [start:applied]
opfuser.apply(net, example=x)
with opfuser.autocast(recipe=recipe):
    loss = net(x).square().mean()
loss.backward()
assert {"1.quantization.scale", "3.quantization.scale"} <= net.state_dict().keys()
# --8<-- [end:applied]

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

# --8<-- [start:stored]
with opfuser.quantized_model_init(recipe=DelayedScaling(), preserve_high_precision_init_val=True):
    stored = Sequential(Linear(64, 256), GELU(), Linear(256, 64))
optimizer = opfuser.optim.MasterWeights(stored, torch.optim.AdamW, lr=1e-3)

with opfuser.autocast(recipe=DelayedScaling()):
    loss = stored(x).square().mean()
loss.backward()
torch.nn.utils.clip_grad_norm_(stored.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
# --8<-- [end:stored]
assert stored[0].weight.dtype == torch.float8_e4m3fn
assert optimizer.optimizer.param_groups[0]["params"][0].dtype == torch.float32

# --8<-- [start:model]
import torch

from opfuser.models import DecoderConfig, decoder_layer

config = DecoderConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4, recompute="mlp")
layer = decoder_layer(config)
x = torch.randn(2, 32, 64, requires_grad=True)
for step in layer.plan(x).forward:
    print(step.indices, type(step.op).__name__)
# --8<-- [end:model]

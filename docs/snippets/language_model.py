# --8<-- [start:model]
import torch

from opfuser.models import DecoderConfig, decoder_lm

config = DecoderConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4)
model = decoder_lm(config)
tokens = torch.randint(256, (2, 33))
loss = model(tokens[:, :-1], tokens[:, 1:])  # the targets are an extra input
loss.backward()
logits = model[:-1](tokens)
# --8<-- [end:model]
assert logits.shape == (2, 33, 256)

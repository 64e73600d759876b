import os
import tempfile
import warnings

warnings.simplefilter("ignore")  # torch's compiler warns of itself
os.chdir(tempfile.mkdtemp())

# --8<-- [start:export]
import torch
from torch.export import Dim

from opfuser.models import DecoderConfig, decoder_lm

model = decoder_lm(DecoderConfig(vocab_size=64, dim=32, num_layers=1, num_heads=2))
tokens, targets = torch.randint(64, (2, 2, 16))
sizes = {0: Dim("rows", max=64), 1: Dim("length", min=2, max=512)}
program = torch.export.export(model, (tokens, targets), dynamic_shapes=(sizes, (sizes,)))
torch.export.save(program, "model.pt2")
# --8<-- [end:export]

# --8<-- [start:load]
loaded = torch.export.load("model.pt2").module()
tokens = torch.randint(64, (3, 101))
loss = loaded(tokens[:, :-1], tokens[:, 1:])
loss.backward()
# --8<-- [end:load]
torch.testing.assert_close(loss, model(tokens[:, :-1], tokens[:, 1:]))

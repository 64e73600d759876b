import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from opfuser.models import DecoderConfig, decoder_lm
from opfuser.models.sharding import shard_layers

store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
config = DecoderConfig(vocab_size=256, dim=64, num_layers=4, num_heads=4)
mesh = init_device_mesh("cpu", (1,))
model = shard_layers(decoder_lm(config), mesh=mesh)
tokens = torch.randint(256, (2, 32))
print(model.plan(tokens, tokens).why("forward_add_rms_norm"))
dist.destroy_process_group()

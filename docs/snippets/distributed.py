import os
import tempfile

import torch
import torch.distributed as dist

from opfuser.models import DecoderConfig

store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
config = DecoderConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4)
tokens, targets = torch.randint(256, (2, 2, 32))
device = "cpu"

# --8<-- [start:shard]
from torch.distributed.device_mesh import init_device_mesh

from opfuser.models import decoder_lm
from opfuser.models.sharding import shard_layers

mesh = init_device_mesh(device, (dist.get_world_size(),))
model = shard_layers(decoder_lm(config), mesh=mesh)
loss = model(tokens, targets)
loss.backward()
# --8<-- [end:shard]
assert all(p.grad.device_mesh == mesh for p in model.parameters())
dist.destroy_process_group()

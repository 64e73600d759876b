import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from opfuser.models import DecoderConfig, decoder_lm

store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
config = DecoderConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4)
tokens, targets = torch.randint(256, (2, 2, 32))
device, ranks = "cpu", 1

# --8<-- [start:parallelize]
from opfuser.models.parallel import parallelize

mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))
model = parallelize(decoder_lm(config), mesh)
optimizer = torch.optim.AdamW(model.parameters())
loss = model(tokens, targets)
loss.backward()
optimizer.step()
# --8<-- [end:parallelize]
assert all(p.grad.device_mesh == mesh for p in model.parameters())

# --8<-- [start:both]
from opfuser.models.sharding import shard_layers

mesh = init_device_mesh(
    device, (dist.get_world_size() // ranks, ranks), mesh_dim_names=("dp", "tp")
)
model = parallelize(decoder_lm(config), mesh["tp"])
model = shard_layers(model, mesh=mesh["dp"])
# --8<-- [end:both]
model(tokens, targets).backward()
assert all(p.grad.device_mesh.ndim == 2 for p in model.parameters())

# --8<-- [start:experts]
from dataclasses import replace

from opfuser.models import MoEConfig

everyone = init_device_mesh(device, (dist.get_world_size(),))
mesh = init_device_mesh(
    device, (dist.get_world_size() // ranks, ranks), mesh_dim_names=("dp", "ep")
)
moe = MoEConfig(dim=64, ffn_dim=32, num_experts=8, top_k=2)
model = parallelize(decoder_lm(replace(config, moe=moe)), expert_parallel=mesh["ep"])
model = shard_layers(model, mesh=everyone, expert_mesh=mesh["dp"])
# --8<-- [end:experts]
model(tokens, targets).backward()
assert all(p.grad is not None for p in model.parameters())
assert model.layers[0].mlp[2].down.weight.device_mesh.ndim == 2
mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("dp", "tp"))

# --8<-- [start:operations]
from opfuser import CrossEntropy, Embedding, Linear, Sequential

group = mesh["tp"].get_group()
shared = {"tensor_parallel_group": group, "sequence_parallel": True, "sequence_dim": 1}
classes = {"tensor_parallel": True, "tensor_parallel_group": group, "num_classes": 256}
bigrams = Sequential(
    Embedding(256, 64, tensor_parallel=True, **shared),
    Linear(64, 256, bias=False, tensor_parallel_mode="vocabulary", **shared),
    CrossEntropy(**classes),
)
# --8<-- [end:operations]
bigrams(tokens, targets).backward()
dist.destroy_process_group()

import os
import tempfile
from dataclasses import replace

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
folder = os.path.join(tempfile.mkdtemp(), "checkpoint")
optimizer = torch.optim.AdamW(model.parameters())

# --8<-- [start:checkpoint]
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
# --8<-- [end:checkpoint]
rank, full = dist.get_rank(), decoder_lm(config).state_dict()
wanted = dict(full)

# --8<-- [start:meta]
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

model = decoder_lm(replace(config, device="meta"))
shard_layers(model, mesh=mesh).to_empty(device=device)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, full if rank == 0 else {}, options=options)
# --8<-- [end:meta]
assert all(torch.equal(p.full_tensor(), wanted[name]) for name, p in model.named_parameters())

# --8<-- [start:apply]
from torch import nn
from torch.distributed.fsdp import fully_shard

import opfuser

block = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
encoder = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
for layer in encoder.layers:
    fully_shard(layer, mesh=mesh)
opfuser.apply(fully_shard(encoder, mesh=mesh))
encoder(torch.randn(2, 32, 64)).square().mean().backward()
# --8<-- [end:apply]
from opfuser.applying import report

assert [entry.path for entry in report(encoder).computed] == ["layers.0", "layers.1"]
dist.destroy_process_group()

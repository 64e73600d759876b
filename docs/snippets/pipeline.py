import os
import tempfile

import torch
import torch.distributed as dist

from opfuser.models import DecoderConfig

store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
config = DecoderConfig(vocab_size=256, dim=64, num_layers=4, num_heads=4, tied_head=False)
tokens, targets = torch.randint(256, (2, 8, 32))
device = "cpu"

# --8<-- [start:train]
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from opfuser.models import decoder_lm
from opfuser.models.pipeline import own_loss, split

rank, processes = dist.get_rank(), dist.get_world_size()
stages = split(decoder_lm(config), 2 * processes)
mine = [
    PipelineStage(stages[n], n, len(stages), device) for n in range(rank, len(stages), processes)
]
schedule = ScheduleInterleaved1F1B(mine, n_microbatches=8, loss_fn=own_loss)

given = {"extra_inputs": (targets,), "target": targets, "return_outputs": False}
losses = []
if rank == 0:
    schedule.step(tokens, losses=losses, **given)
else:
    schedule.step(losses=losses, **given)
# --8<-- [end:train]
assert len(losses) == 8
assert all(p.grad is not None for stage in mine for p in stage.submod.parameters())

dist.destroy_process_group()

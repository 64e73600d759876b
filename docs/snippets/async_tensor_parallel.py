import os
import tempfile

import torch
import torch.distributed as dist

import opfuser

store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
group = dist.group.WORLD

# --8<-- [start:choose]
opfuser.async_tensor_parallel.choose("symm_mem", group)  # "torch" takes it back
# --8<-- [end:choose]
x = torch.randn(4, 8)
op = opfuser.BasicLinear(
    8, 8, tensor_parallel_mode="column", tensor_parallel_group=group, sequence_parallel=True
)
torch.testing.assert_close(op(x), x @ op.weight.t())
opfuser.async_tensor_parallel.choose("torch", group)
dist.destroy_process_group()

import torch
from torch.distributed.device_mesh import init_device_mesh

import opfuser
from opfuser.models import DecoderConfig, decoder_lm

if torch.distributed.is_torchelastic_launched():  # torch has it for GPUs alone
    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(torch.distributed.get_node_local_rank())
    config = DecoderConfig(256, 128, 2, 4, device="cuda", dtype=torch.bfloat16)
    model = decoder_lm(config)
    tokens, targets = torch.randint(256, (2, 2, 256), device="cuda")
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    # --8<-- [start:step]
    from torch.distributed.tensor.experimental import context_parallel

    positions = torch.arange(tokens.shape[1], device=tokens.device)
    ropes = [op for op in model.modules() if isinstance(op, opfuser.RotaryEmbedding)]
    with context_parallel(mesh, buffers=[tokens, targets, positions], buffer_seq_dims=[1, 1, 0]):
        loss = model(tokens, targets, op_kwargs={op: {"positions": positions} for op in ropes})
        loss.backward()
    # --8<-- [end:step]
    torch.distributed.destroy_process_group()

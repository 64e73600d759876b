# --8<-- [start:apply]
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

# was: from liger_kernel.transformers import apply_liger_kernel_to_llama
import opfuser.hf

sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 100}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(num_hidden_layers=2, pad_token_id=0, **sizes, **heads)
model = AutoModelForCausalLM.from_config(config)

# was: apply_liger_kernel_to_llama(model=model)
print(opfuser.hf.apply(model, fused_loss=True, merge_storages=True))
# --8<-- [end:apply]

tokens = torch.randint(1, 100, (2, 8))
assert model(tokens, labels=tokens).logits is None
model(tokens, labels=tokens).loss.backward()
opfuser.hf.revert(model)

# --8<-- [start:apply]
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import opfuser.hf

sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 100}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(num_hidden_layers=2, pad_token_id=0, **sizes, **heads)
model = AutoModelForCausalLM.from_config(config)  # or from_pretrained("...")
print(opfuser.hf.apply(model))
# --8<-- [end:apply]

tokens = torch.randint(1, 100, (2, 8))
model(tokens, labels=tokens).loss.backward()

# --8<-- [start:report]
with torch.no_grad():
    logits, cache = model(tokens, return_dict=False)
model(tokens, None, None, cache).logits.sum().backward()
first = opfuser.hf.report(model).computed[0]
assert first.fell_back == (("reads keys of other calls, with gradients enabled", 1),)
# --8<-- [end:report]

# --8<-- [start:revert]
opfuser.hf.revert(model)
# --8<-- [end:revert]
assert opfuser.hf.report(model).computed == ()

# --8<-- [start:loss]
opfuser.hf.apply(model, fused_loss=True)
assert model.train()(tokens, labels=tokens).logits is None
# --8<-- [end:loss]

# --8<-- [start:attention]
opfuser.hf.register_attention()
model = AutoModelForCausalLM.from_config(config, attn_implementation="opfuser")
# --8<-- [end:attention]
model(tokens, labels=tokens).loss.backward()

import warnings
from types import SimpleNamespace

# --8<-- [start:config]
import torch

from opfuser.models import (
    DecoderConfig,
    EncoderConfig,
    attention_kwargs,
    decoder_lm,
    generate,
    hf_state_dict,
    load_hf,
    text_encoder,
)

config = DecoderConfig(
    vocab_size=256,
    dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    qk_norm=True,
    window=(16, None),  # one for each layer
    tied_head=False,
)
model = decoder_lm(config)
tokens = torch.randint(256, (2, 33))
loss = model(tokens[:, :-1], tokens[:, 1:])
loss.backward()
# --8<-- [end:config]

# --8<-- [start:from_hf]
hf_config = SimpleNamespace(  # or transformers.AutoConfig.from_pretrained(...)
    model_type="llama",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=None,
    attention_dropout=0.0,
    tie_word_embeddings=True,
    initializer_range=0.02,
    pad_token_id=None,
)
llama = decoder_lm(DecoderConfig.from_hf(hf_config, dtype=torch.bfloat16))
checkpoint = hf_state_dict(llama)  # or hf_model.state_dict()
load_hf(llama, checkpoint)
# --8<-- [end:from_hf]
assert checkpoint["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
torch.testing.assert_close(hf_state_dict(llama), checkpoint, rtol=0, atol=0)

# --8<-- [start:encoder]
encoder = text_encoder(EncoderConfig(vocab_size=256, dim=64, num_layers=2, num_heads=4))
types = torch.zeros_like(tokens)
real = torch.ones_like(tokens, dtype=torch.bool)
real[1, 20:] = False  # padding
hidden = encoder(tokens, types, op_kwargs=attention_kwargs(encoder, mask=real))
# --8<-- [end:encoder]
torch.testing.assert_close(hidden[1:, :20], encoder(tokens[1:, :20], types[1:, :20]))

# --8<-- [start:generate]
model.eval()
prompts = torch.tensor([[7, 8, 9, 10], [0, 0, 5, 6]])
mask = torch.tensor([[True] * 4, [False, False, True, True]])  # padding is on the left
greedy = generate(model, prompts, max_new_tokens=8, mask=mask)
drawn = generate(
    model, prompts, 8, mask=mask, do_sample=True, temperature=0.8, top_k=50, top_p=0.95
)
# --8<-- [end:generate]
torch.testing.assert_close(greedy[1:, 2:], generate(model, prompts[1:, 2:], 8), rtol=0, atol=0)
assert drawn.shape == (2, 12)

warnings.simplefilter("ignore", DeprecationWarning)  # torch's compiler warns of itself
warnings.simplefilter("ignore", FutureWarning)

# --8<-- [start:compiled]
step = torch.compile(model[:-1], fullgraph=True, backend="aot_eager")
fixed = generate(model, prompts, 8, mask=mask, static_cache=True, step=step)
# --8<-- [end:compiled]
torch.testing.assert_close(fixed, greedy, rtol=0, atol=0)

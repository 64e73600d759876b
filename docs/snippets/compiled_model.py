import warnings

warnings.simplefilter("ignore", DeprecationWarning)  # torch's compiler warns of itself
warnings.filterwarnings("ignore", "The .grad attribute")

# --8<-- [start:compile]
import torch

from opfuser.models import DecoderConfig, decoder_lm

model = decoder_lm(DecoderConfig(vocab_size=64, dim=32, num_layers=1, num_heads=2))
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")


def step(rows, length):
    tokens = torch.randint(64, (rows, length + 1))
    compiled(tokens[:, :-1], tokens[:, 1:]).backward()


step(2, 16)  # traced for these sizes
step(3, 24)  # traced for all sizes
with torch.compiler.set_stance("fail_on_recompile"):
    for rows, length in (2, 16), (5, 7), (4, 31):
        step(rows, length)
# --8<-- [end:compile]

# --8<-- [start:layers]
for layer in model.layers:
    layer.compile(fullgraph=True, backend="aot_eager")
# --8<-- [end:layers]
tokens = torch.randint(64, (2, 9))
model(tokens[:, :-1], tokens[:, 1:]).backward()

# --8<-- [start:layouts]
import torch

from opfuser import RopeScaling, RotaryEmbedding

packed = RotaryEmbedding(num_heads=8, head_dim=64, num_kv_heads=2)
y = packed(torch.randn(1, 100, (8 + 2 + 2) * 64))

queries = RotaryEmbedding(num_heads=8, head_dim=64, num_kv_heads=0)
q = queries(torch.randn(1, 100, 8 * 64))
# --8<-- [end:layouts]

# --8<-- [start:packed]
first, second = torch.randn(1, 60, 12 * 64), torch.randn(1, 40, 12 * 64)
positions = torch.cat([torch.arange(60), torch.arange(40)])
y = packed(torch.cat([first, second], 1), positions=positions)
# --8<-- [end:packed]
torch.testing.assert_close(y, torch.cat([packed(first), packed(second)], 1))

# --8<-- [start:scaling]
scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
rope = RotaryEmbedding(8, 64, num_kv_heads=2, base=1e6, scaling=scaling)
frequencies = rope.inverse_frequencies()  # radians per position, one for each of 32 pairs
factor = rope.attention_scaling  # of cosine and sine: 0.1 ln 4 + 1

config = {  # or a configuration of transformers
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rope_theta": 1e6,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
}
same = RotaryEmbedding.from_hf(config)
assert same.scaling == RopeScaling.from_hf(config) == scaling
# --8<-- [end:scaling]
assert repr(same) == repr(rope)
assert round(factor, 6) == 1.138629
assert frequencies[0] == 1

# --8<-- [start:custom]
inv_freq = torch.logspace(0, -4, 32)  # a buffer of some model
custom = RopeScaling(rope_type="custom", frequencies=inv_freq)
rope = RotaryEmbedding(8, 64, num_kv_heads=2, scaling=custom)
# --8<-- [end:custom]
torch.testing.assert_close(rope.inverse_frequencies(), inv_freq)

# --8<-- [start:length]
dynamic = RopeScaling(rope_type="dynamic", factor=2.0, original_max_position_embeddings=64)
rope = RotaryEmbedding(8, 64, num_kv_heads=2, scaling=dynamic)
x = torch.randn(1, 100, 12 * 64)
y = rope(x)
last = rope(x[:, 99:], positions=torch.tensor([99]), length=100)
# --8<-- [end:length]
torch.testing.assert_close(last, y[:, 99:])

# --8<-- [start:sections]
rope = RotaryEmbedding(8, 64, num_kv_heads=2, sections=(16, 8, 8))  # time, height, width
places = torch.stack([torch.zeros(6), torch.arange(6) // 3, torch.arange(6) % 3]).long()
y = rope(torch.randn(1, 6, 12 * 64), positions=places[:, None])  # (3, batch, sequence)

image = RotaryEmbedding(8, 64, sections=(16, 16), scaling=RopeScaling(rope_type="axial"))
y = image(torch.randn(1, 6, 24 * 64), positions=places[1:, None])
# --8<-- [end:sections]
assert not torch.equal(y, image(torch.randn(1, 6, 24 * 64)))

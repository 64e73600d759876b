import torch

from opfuser.integrations.te import LayerNormMLPOptions, load_te_state_dict, te_state_dict

# --8<-- [start:checkpoint]
# As te.LayerNormMLP(64, 128, activation="swiglu", normalization="RMSNorm", bias=False) saves it.
checkpoint = {
    "layer_norm_weight": torch.ones(64),
    "fc1_weight": torch.randn(256, 64),
    "fc2_weight": torch.randn(64, 128),
    "_extra_state": torch.empty(0, dtype=torch.uint8),
}
options = LayerNormMLPOptions(
    hidden_size=64, ffn_hidden_size=128, activation="swiglu", normalization="RMSNorm", bias=False
)
model = options.build()
load_te_state_dict(model, checkpoint)
print(model)
print(list(model.state_dict()))
print(list(te_state_dict(model)))
# --8<-- [end:checkpoint]

"""Models whose layers are Transformer Engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks.gpu.peers import TE, Functions, attribute, engine, peer

# In the order of the models here.
PARAMETERS = (
    "self_attention.layernorm_qkv.layer_norm_weight",
    "self_attention.layernorm_qkv.layer_norm_bias",
    "self_attention.layernorm_qkv.weight",
    "self_attention.layernorm_qkv.bias",
    "self_attention.proj.weight",
    "self_attention.proj.bias",
    "layernorm_mlp.layer_norm_weight",
    "layernorm_mlp.layer_norm_bias",
    "layernorm_mlp.fc1_weight",
    "layernorm_mlp.fc1_bias",
    "layernorm_mlp.fc2_weight",
    "layernorm_mlp.fc2_bias",
)


@dataclass(frozen=True)
class LayerKind:
    """What a layer computes, besides what its parameters say.

    Attributes:
        rotary_length: of the sequence, where queries and keys are rotated; else 0.
        gated: RMSNorm, SwiGLU and no biases, instead of LayerNorm, GELU and biases.
    """

    heads: int
    eps: float
    causal: bool = True
    rotary_length: int = 0
    gated: bool = False


class EngineLayer(nn.Module):
    """The layer with the parameters of ``source``, this rank's where ``options`` say ``tp_size``.

    ``options`` are further arguments of Transformer Engine.
    """

    def __init__(self, source: nn.Module, kind: LayerKind, **options: Any) -> None:
        super().__init__()
        parameters = list(source.parameters())
        norm, out = parameters[0], parameters[-1 if kind.gated else -2]
        self.layer: Any = engine("TransformerLayer")(
            norm.numel(),
            out.shape[1] * options.get("tp_size", 1),
            kind.heads,
            layernorm_epsilon=kind.eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="causal" if kind.causal else "no_mask",
            normalization="RMSNorm" if kind.gated else "LayerNorm",
            activation="swiglu" if kind.gated else "gelu",
            bias=not kind.gated,
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            params_dtype=norm.dtype,
            device=norm.device,
            **{"attn_input_format": "bshd", **options},
        )
        names = [n for n in PARAMETERS if not (kind.gated and n.endswith("bias"))]
        for name, parameter in zip(names, parameters, strict=True):
            owner, _, last = name.rpartition(".")
            setattr(self.layer.get_submodule(owner), last, parameter)
        self.angles: Tensor | None = None
        if kind.rotary_length:
            table = attribute("transformer_engine.pytorch.attention:RotaryPositionEmbedding")
            made = table(norm.numel() // kind.heads)(kind.rotary_length)
            self.angles = made.to(norm.device)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, rotary_pos_emb=self.angles)


def engine_model(build: Callable[[], nn.Module], kind: LayerKind) -> Functions:
    """The entry of a torch.nn model in which Transformer Engine computes ``layers``."""

    def for_te() -> nn.Module:
        model = build()
        layers: Any = model.layers
        model.layers = nn.Sequential(*(EngineLayer(layer, kind) for layer in layers))
        return model

    return peer(TE, for_te)

"""The names of parameters in the checkpoints of Hugging Face's transformers."""

from __future__ import annotations

from typing import NamedTuple

HEAD = "lm_head"
CLASS_TOKEN = "embeddings.cls_token"


class Names(NamedTuple):
    """The names of modules in checkpoints of one family.

    Attributes:
        prefix: of all but the head, which checkpoints of a model without a head lack.
        layer: prefix of those of one layer.
        norms: of a layer, in the order in which they are applied.
        transposed: whether weights of linears in layers are (in_features, out_features).
        ignored: what checkpoints hold besides parameters.
    """

    prefix: str
    embedding: str
    layer: str
    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    ignored: str
    positions: str = ""
    types: str = ""
    embedding_norm: str = ""
    qk_norms: tuple[str, str] = ("", "")
    norm: str = ""
    transposed: bool = False


LLAMA = Names(
    prefix="model.",
    embedding="embed_tokens",
    layer="layers.{}.",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    norm="norm",
    ignored=r"\.rotary_emb\.inv_freq$",
)
GEMMA2 = LLAMA._replace(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)
GPT2 = Names(
    prefix="transformer.",
    embedding="wte",
    positions="wpe",
    layer="h.{}.",
    norms=("ln_1", "ln_2"),
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    norm="ln_f",
    transposed=True,
    ignored=r"\.attn\.(masked_)?bias$",
)
BERT = Names(
    prefix="bert.",
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    up=("intermediate.dense",),
    down="output.dense",
    ignored=r"^cls\.|(^|\.)pooler\.|\.(position|token_type)_ids$",
)
VIT = Names(
    prefix="vit.",
    embedding="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    layer="layers.{}.",
    norms=("layernorm_before", "layernorm_after"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
    norm="layernorm",
    ignored=r"^classifier\.|^decoder\.|(^|\.)pooler\.|\.mask_token$",
)
# As transformers 4 has them, and checkpoints that it wrote.
VIT_4 = VIT._replace(
    layer="encoder.layer.{}.",
    qkv=tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    out="attention.output.dense",
    up=("intermediate.dense",),
    down="output.dense",
)


class ExpertNames(NamedTuple):
    """The names of parameters of a feed-forward block with experts, which stand behind a layer's.

    Attributes:
        gate_up: of the experts' first linears; with ``{}`` for the expert, one of each of them.
        down: of their second ones, likewise.
        shared: gate, up and down of the expert that all tokens have.
        shared_gate: of what its output is scaled by.
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    shared: tuple[str, str, str] = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
    shared_gate: str = "mlp.shared_expert_gate"


EXPERTS = ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj")
# As transformers 4 has them, and checkpoints on disk.
EXPERTS_4 = EXPERTS._replace(
    gate_up=("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    down="mlp.experts.{}.down_proj.weight",
)
MIXTRAL_4 = ExpertNames(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    "block_sparse_moe.experts.{}.w2.weight",
)

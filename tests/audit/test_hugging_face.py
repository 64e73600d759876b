"""Models of transformers, built from configurations: what is missed, site by site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser.hf
from opfuser.report.audit import audit

from .test_ground_truth import counted

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
PICTURES: dict[str, Any] = {"image_size": 8, "patch_size": 4}
TOKENS = torch.zeros(2, 8, dtype=torch.int64, device="meta")


def causal(name: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def bare(name: str, **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**sizes)
    return transformers.AutoModel.from_config(config).train()


def llama(**others: Any) -> nn.Module:
    return causal("Llama", num_key_value_heads=2, **{**SIZES, **others})


def gpt2() -> nn.Module:
    return causal("GPT2", n_embd=32, n_layer=LAYERS, n_head=4, vocab_size=37, n_positions=32)


# Of LAYERS layers; sites are called once each.
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, int]]] = {
    "llama": (
        llama,
        TOKENS,
        {
            "rms_norm": 2 * LAYERS + 1,
            "rotary_embedding": 2 * LAYERS,  # queries and keys
            "swiglu": LAYERS,
            "activation_linear": LAYERS,  # swiglu and down projection
            "merged_linear": 2 * LAYERS,  # q, k, v; gate, up
            "norm_linear": 2 * LAYERS,
            "forward_add_rms_norm": 1,  # the last norm, behind which nothing is multiplied
        },
    ),
    "gpt2": (
        gpt2,
        TOKENS,
        {
            "gelu_tanh": LAYERS,
            "activation_linear": LAYERS,
            "norm_linear": 2 * LAYERS,
            "pointwise_norm": 1,  # dropout, sum and the last norm
        },
    ),
    "bert": (
        lambda: bare("Bert", **SIZES),
        TOKENS,
        {
            "embedding_norm": 1,
            "merged_linear": LAYERS,
            "activation_linear": LAYERS,
            "pointwise_norm": 2 * LAYERS,  # bias, dropout, sum, norm
            "pointwise_chain": 1,  # bias and tanh of the pooler
        },
    ),
    "vit": (
        lambda: bare("ViT", **{**SIZES, **PICTURES}),
        torch.zeros(2, 3, 8, 8, device="meta"),
        {
            "merged_linear": LAYERS,
            "activation_linear": LAYERS,
            "norm_linear": 2 * LAYERS,
            "forward_add_layer_norm": 1,
            "pointwise_chain": 1,
        },
    ),
    "mixtral": (
        lambda: causal("Mixtral", num_key_value_heads=2, num_local_experts=4, **SIZES).bfloat16(),
        TOKENS,
        {
            "rms_norm": 2 * LAYERS + 1,
            "rotary_embedding": 2 * LAYERS,
            "swiglu": LAYERS,  # of the experts
            "merged_linear": LAYERS,
            "norm_linear": LAYERS,  # before attention; experts and router read the other norm
            "forward_add_rms_norm": LAYERS + 1,
            "backward_add_rms_norm": LAYERS,
            "backward_linear_add": LAYERS,  # the router's, and the experts' gradients
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_missed(name: str) -> None:
    make, inputs, sites = MODELS[name]
    with torch.device("meta"):
        model = make()
    todo = audit(model, [inputs])
    assert counted(todo) == {fused: (count, count) for fused, count in sites.items()}
    for missed in todo.missed_fusions:
        assert missed.estimate.launches_saved + missed.estimate.bytes_saved_per_call > 0


def test_attention_that_is_computed_step_by_step() -> None:
    with torch.device("meta"):
        model = llama(attn_implementation="eager")
    assert counted(audit(model, [TOKENS]))["attention"] == (LAYERS, LAYERS)


def test_the_loss_of_a_language_model() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(vocab_size=8192)

        def forward(self, tokens: Tensor) -> Tensor:
            loss: Tensor = self.model(tokens, labels=tokens).loss
            return loss

    tokens = torch.zeros(2, 512, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = Trained()
    todo = audit(model, [tokens])
    assert counted(todo)["linear_cross_entropy"] == (1, 1)
    (loss,) = (m for m in todo.missed_fusions if m.fused_op == "linear_cross_entropy")
    told = "opfuser.hf.apply(model, fused_loss=True) replaces this"
    assert [m.fused_op for m in todo.missed_fusions if told in m.instances[0].notes] == [
        loss.fused_op
    ]
    opfuser.hf.apply(model, fused_loss=True)
    assert "linear_cross_entropy" not in counted(audit(model, [tokens]))
    assert loss.component_ops == ("linear", "cross_entropy")
    logits = 2 * 512 * 8192 * 4
    assert loss.estimate.bytes_saved_per_call > logits


def test_where_opfuser_computes_the_layers_nothing_is_left() -> None:
    model = llama()
    opfuser.hf.apply(model)
    assert audit(model, [torch.zeros(2, 8, dtype=torch.int64)]).missed_fusions == ()
    assert len(opfuser.hf.report(model).computed) > 0

"""Encoders of images against their counterparts in Hugging Face's transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import ArgumentError, InputError, NotSupportedError
from opfuser.models import ImageEncoderConfig, hf_state_dict, image_encoder, load_hf
from tests.models.hf import distance, fill, transformers

VIT: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 28,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 2,
}
CONFIGS = {
    "square": VIT,
    "oblong, no biases": {
        **VIT, "image_size": [12, 8], "patch_size": [3, 4], "qkv_bias": False, "hidden_act": "silu"
    },
}  # fmt: skip


def hf_vit(sizes: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.ViTConfig(**sizes, attn_implementation="eager")
    model: nn.Module = transformers.ViTModel(config, add_pooling_layer=False)
    fill(model, 1.0)
    return model.train()


def same_encoder(theirs: Any, **changes: Any) -> opfuser.Sequential:
    model = image_encoder(ImageEncoderConfig.from_hf(theirs.config, **changes))
    load_hf(model, theirs.state_dict())
    return model


def results(model: Any, seed: int = 1) -> dict[str, Tensor]:
    """The hidden states, and the gradients of the images and of every parameter by its name."""
    ours = isinstance(model, opfuser.Sequential)
    dtype = next(model.parameters()).dtype
    config = None if ours else model.config
    size = model[0].image_size if ours else model.embeddings.patch_embeddings.image_size
    channels = 2 if ours else config.num_channels
    torch.manual_seed(seed)
    images = torch.randn(3, channels, *size).to(dtype).requires_grad_()
    y = model(images) if ours else model(images).last_hidden_state
    y.backward(torch.randn(y.shape).to(dtype))
    grads = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(grads.parameters(), model.parameters()):
            p.copy_(q.grad)
    named = hf_state_dict(grads) if ours else grads.state_dict()
    assert images.grad is not None
    return {"output": y.detach(), "images": images.grad, **named}


def test_bf16_error_is_at_most_twice_theirs() -> None:
    own_error: dict[str, float] = {}
    their_error: dict[str, float] = {}
    for seed in range(4):
        theirs = hf_vit(VIT, seed).to(torch.bfloat16)
        ours = same_encoder(theirs, dtype=torch.bfloat16)
        wanted = results(copy.deepcopy(theirs).double())
        theirs.set_attn_implementation("sdpa")
        for got, error in ((results(ours), own_error), (results(theirs), their_error)):
            for key, value in wanted.items():
                if not key.endswith("k_proj.bias"):
                    error[key] = error.get(key, 0.0) + distance(got[key], value) / 4
    for key, error in own_error.items():
        assert error <= 2 * their_error[key], key


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_come_out_as_they_went_in_and_heads_are_left_out(name: str) -> None:
    theirs = hf_vit(CONFIGS[name])
    model, wanted = same_encoder(theirs), dict(theirs.state_dict())
    torch.testing.assert_close(hf_state_dict(model), wanted, rtol=0, atol=0)
    whole = transformers.ViTForImageClassification(theirs.config)
    load_hf(model, whole.state_dict())
    wanted = dict(whole.vit.state_dict())
    torch.testing.assert_close(hf_state_dict(model), wanted, rtol=0, atol=0)


def test_checkpoints_of_transformers_4() -> None:
    theirs = hf_vit(VIT)
    names = {
        "layers.": "encoder.layer.", "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key", "mlp.fc2": "output.dense",
        "attention.v_proj": "attention.attention.value", "mlp.fc1": "intermediate.dense",
        "attention.o_proj": "attention.output.dense",
    }  # fmt: skip
    old = {}
    for key, value in theirs.state_dict().items():
        for new, before in names.items():
            key = key.replace(new, before)  # noqa: PLW2901 - one after another
        old[f"vit.{key}"] = value
    assert "vit.encoder.layer.1.attention.output.dense.weight" in old
    model = same_encoder(hf_vit(VIT, seed=1))
    load_hf(model, {**old, "classifier.weight": torch.ones(2, 24)})
    torch.testing.assert_close(hf_state_dict(model), dict(theirs.state_dict()), rtol=0, atol=0)


def test_images_of_another_size_are_refused() -> None:
    model = image_encoder(ImageEncoderConfig(12, 4, 8, 1, 2))
    with pytest.raises(InputError, match=r"channels, 12, 12\) \(Patches\)\. .* \(1, 3, 8, 12\)"):
        model(torch.randn(1, 3, 8, 12))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"patch_size": 5}, r"whole number of patches .* image_size=12, patch_size=5, channels=3"),
        ({"channels": 0}, r"\(ImageEncoderConfig\)\. .*channels=0"),
        ({"num_heads": 3}, r"multiple of num_heads"),
    ],
)
def test_arguments_are_checked(change: dict[str, Any], text: str) -> None:
    arguments = {"image_size": 12, "patch_size": 4, "dim": 8, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ArgumentError, match=text):
        ImageEncoderConfig(**{**arguments, **change})


def test_other_configurations_are_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"types: vit \(ImageEncoderConfig\.from_hf\)"):
        ImageEncoderConfig.from_hf(transformers.DeiTConfig())

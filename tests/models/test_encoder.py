"""Encoders against their counterparts in Hugging Face's transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import ArgumentError, NotSupportedError
from opfuser.models import (
    EncoderConfig,
    attention_kwargs,
    hf_state_dict,
    load_hf,
    text_encoder,
)
from tests.models.hf import BERT, distance, hf_encoder, transformers

# Of the second row only the first tokens count.
MASK = torch.ones(3, 17, dtype=torch.bool)
MASK[1, 5:] = False


def same_encoder(theirs: Any, **changes: Any) -> opfuser.Sequential:
    model = text_encoder(EncoderConfig.from_hf(theirs.config, **changes))
    load_hf(model, theirs.state_dict())
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their types, and a gradient of the output, which padding does not get."""
    dy = torch.randn(3, 17, 24) * MASK[..., None]
    return torch.randint(37, (3, 17)), torch.randint(3, (3, 17)), dy


def results(model: nn.Module, call: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """The output at what is no padding, and the gradient of every parameter by its name there."""
    torch.manual_seed(1)
    tokens, types, dy = batch()
    y = call(tokens, types)
    y.backward(dy.to(y.dtype))
    grads = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(grads.parameters(), model.parameters()):
            p.copy_(q.grad)  # type: ignore[arg-type]
    named = hf_state_dict(grads) if isinstance(grads, opfuser.Sequential) else grads.state_dict()
    return {"output": (y * MASK[..., None]).detach(), **named}


def of_theirs(model: Any) -> dict[str, Tensor]:
    return results(
        model,
        lambda tokens, types: (
            model(tokens, attention_mask=MASK.long(), token_type_ids=types).last_hidden_state
        ),
    )


def of_ours(model: opfuser.Sequential) -> dict[str, Tensor]:
    mask = attention_kwargs(model, mask=MASK)
    return results(model, lambda tokens, types: model(tokens, types, op_kwargs=mask))


def test_hidden_states_and_every_gradient_of_a_padded_batch() -> None:
    theirs = hf_encoder(BERT)
    got, wanted = of_ours(same_encoder(theirs)), of_theirs(theirs)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        if key.endswith("key.bias"):  # zero, as the softmax of scores ignores what all share
            assert max(value.abs().max(), got[key].abs().max()) < 1e-5
            continue
        assert value.norm() > 1e-3, f"{key} tells nothing"
        assert distance(got[key], value) <= 1e-5, key


def test_bf16_error_is_at_most_twice_theirs() -> None:
    own_error: dict[str, float] = {}
    their_error: dict[str, float] = {}
    for seed in range(4):
        theirs = hf_encoder(BERT, seed).to(torch.bfloat16)
        ours = same_encoder(theirs, dtype=torch.bfloat16)
        wanted = of_theirs(copy.deepcopy(theirs).double())
        theirs.set_attn_implementation("sdpa")
        for got, error in ((of_ours(ours), own_error), (of_theirs(theirs), their_error)):
            for key, value in wanted.items():
                if not key.endswith("key.bias"):
                    error[key] = error.get(key, 0.0) + distance(got[key], value) / 4
    for key, error in own_error.items():
        assert error <= 2 * their_error[key], key


def test_weights_come_out_as_they_went_in_and_heads_are_left_out() -> None:
    theirs = hf_encoder(BERT)
    wanted = dict(theirs.state_dict())
    model = same_encoder(theirs)
    torch.testing.assert_close(hf_state_dict(model), wanted, rtol=0, atol=0)
    whole = transformers.BertForMaskedLM(theirs.config)
    load_hf(model, whole.state_dict())
    wanted = dict(whole.bert.state_dict())
    torch.testing.assert_close(hf_state_dict(model), wanted, rtol=0, atol=0)
    pooled = transformers.BertModel(theirs.config)
    load_hf(model, {**pooled.state_dict(), "embeddings.position_ids": torch.arange(64)[None]})
    wanted = {k: t for k, t in pooled.state_dict().items() if "pooler" not in k}
    torch.testing.assert_close(hf_state_dict(model), wanted, rtol=0, atol=0)


def test_norm_first_is_torchs() -> None:
    """Of one layer, with the norm behind it, in float64."""
    to: dict[str, Any] = {"dtype": torch.float64}
    config = EncoderConfig(9, 8, 1, 2, norm_first=True, norm_eps=1e-5, **to)
    model = text_encoder(config)
    layer = nn.TransformerEncoderLayer(
        8, 2, 32, 0.0, "gelu", 1e-5, batch_first=True, norm_first=True, **to
    )
    attention, mlp = model[4][0].attention, model[4][0].mlp
    pairs = [(attention[1], layer.norm1), (mlp[1], layer.norm2)]
    pairs += [(attention[4], layer.self_attn.out_proj)]
    pairs += [(mlp[2], layer.linear1), (mlp[4], layer.linear2)]
    for own, their in pairs:
        own.load_state_dict(their.state_dict())
    own_qkv = {"weight": layer.self_attn.in_proj_weight, "bias": layer.self_attn.in_proj_bias}
    attention[2].load_state_dict(own_qkv)
    tokens, types = torch.randint(9, (2, 5)), torch.randint(2, (2, 5))
    wanted = model[5](layer(model[:4](tokens, types)))
    torch.testing.assert_close(model(tokens, types), wanted)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"is_decoder": True}, r"without is_decoder \(from_hf of a bert\)"),
        ({"hidden_act": "mish"}, "hidden_act must be one of"),
        ({"position_embedding_type": "relative_key"}, r"'absolute'.* Received: 'relative_key'"),
        ({"model_type": "roberta"}, r"types: bert \(EncoderConfig.from_hf\).*'roberta'"),
    ],
)
def test_what_cannot_be_expressed_is_refused(change: dict[str, Any], text: str) -> None:
    config = transformers.BertConfig(**BERT)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(NotSupportedError, match=text):
        EncoderConfig.from_hf(config)


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"multiple of num_heads .* dim=8, num_heads=3"):
        EncoderConfig(9, 8, 1, 3)

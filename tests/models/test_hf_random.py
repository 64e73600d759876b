"""Random configurations: what ``from_hf`` reads is what the models of transformers compute."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser.hf
from opfuser.errors import NotSupportedError
from opfuser.models import DecoderConfig, EncoderConfig, ImageEncoderConfig, hf_state_dict
from tests.models import test_encoder, test_image_encoder
from tests.models.hf import SIZES, distance, fill, hf_model, run, run_hf, same_model
from tests.models.hf import transformers as hf
from tests.models.random_configs import (
    ENCODERS,
    FAMILIES,
    LENGTH,
    VOCABULARY,
    sample,
    sample_encoder,
)

SEEDS = range(8)


def batch(seed: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens, and a gradient of their logits."""
    torch.manual_seed(seed)
    tokens, dy = torch.randint(VOCABULARY, (3, LENGTH)), torch.randn(3, LENGTH, VOCABULARY)
    return tokens.to(device), dy.to(device)


def compare(got: dict[str, Tensor], wanted: dict[str, Any], what: object) -> None:
    """Gradients that are nearly zero everywhere, as with a window of one, are so in both."""
    for key, value in wanted.items():
        right = torch.zeros_like(got[key]) if value is None else value  # of experts without tokens
        error = (got[key] - right).norm().item()
        assert error <= 3e-5 * max(right.norm().item(), 1.0), f"{key} of {what}"


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders(family: str) -> None:
    for seed in SEEDS:
        sizes = sample(family, seed)
        theirs = hf_model(family, sizes, seed)
        data = batch(seed)
        compare(run(same_model(theirs), *data), run_hf(theirs, *data), sizes)


def encoders(family: str, seed: int, **changes: Any) -> tuple[Any, Any, dict[str, Tensor], Any]:
    """Ours, theirs, inputs by their names there, and the sizes."""
    sizes = {**sample_encoder(family, seed), **changes}
    config = getattr(hf, f"{family}Config")(**sizes, attn_implementation="eager")
    torch.manual_seed(seed)
    theirs = getattr(hf, f"{family}Model")(config, add_pooling_layer=False).train()
    fill(theirs, 1.0)
    if family == "ViT":
        ours = test_image_encoder.same_encoder(theirs)
        images = torch.randn(3, sizes["num_channels"], *ours[0].image_size, requires_grad=True)
        return ours, theirs, {"pixel_values": images}, sizes
    tokens, types = torch.randint(VOCABULARY, (3, LENGTH)), torch.randint(3, (3, LENGTH))
    ours = test_encoder.same_encoder(theirs)
    return ours, theirs, {"input_ids": tokens, "token_type_ids": types}, sizes


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family: str) -> None:
    for seed in SEEDS:
        ours, theirs, given, sizes = encoders(family, seed)
        y, wanted = ours(*given.values()), theirs(**given).last_hidden_state
        dy = torch.randn(y.shape)
        sides = []
        for model, out in ((ours, y), (theirs, wanted)):
            inputs = [t for t in given.values() if t.requires_grad]
            of_inputs = torch.autograd.grad(out, inputs, dy, retain_graph=True) if inputs else ()
            grads = with_gradients(model, out, dy)
            named = hf_state_dict(grads) if model is ours else grads.state_dict()
            sides.append({**named, "output": out, **dict(zip(given, of_inputs))})
        compare(*sides, sizes)


def with_gradients(model: Any, y: Tensor, dy: Tensor) -> Any:
    """A copy whose parameters are the gradients."""
    y.backward(dy)
    grads = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(grads.parameters(), model.parameters()):
            p.copy_(q.grad)
    return grads


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_error_is_at_most_twice_theirs_and_no_factor_is_off(
    family: str, device: torch.device
) -> None:
    own_error, their_error = torch.zeros(2), torch.zeros(2)
    for seed in SEEDS[:4]:
        sizes = {**sample(family, seed), "reorder_and_upcast_attn": False}  # which refuses fp64
        theirs: Any = hf_model(family, sizes, seed).to(device, torch.bfloat16)
        data = batch(seed, device)
        exact = run_hf(copy.deepcopy(theirs).double(), *data)
        ours = same_model(theirs, dtype=torch.bfloat16, device=device)
        later = same_model(theirs, device=device).to(torch.bfloat16)
        if family != "Gemma2":  # which has eager attention alone
            theirs.set_attn_implementation("sdpa")
        own_error += errors(run(ours, *data), exact)
        their_error += errors(run_hf(theirs, *data), exact)
        with torch.no_grad():
            first = theirs(input_ids=data[0], use_cache=False, output_hidden_states=True)
            for model in (ours, later):
                layers = list(model._modules).index("layers")
                assert torch.equal(model[:layers](data[0]), first.hidden_states[0])
    assert (own_error <= 2 * their_error).all()


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> Tensor:
    """Of the logits, and of all gradients together."""
    names = [key for key, value in exact.items() if key != "logits" and value is not None]
    pairs = [torch.cat([results[n].double().flatten() for n in names]) for results in (got, exact)]
    return torch.tensor([distance(got["logits"], exact["logits"]), distance(*pairs)])


DROPOUTS = [
    *((family, "attention_dropout") for family in FAMILIES if family != "GPT2"),
    *(("GPT2", name) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
]


@pytest.mark.parametrize(("family", "name"), DROPOUTS)
def test_dropout_is_where_it_is_there(family: str, name: str) -> None:
    """With a probability of one its results are certain."""
    theirs = hf_model(family, {**sample(family, 3), name: 1.0})
    tokens, _ = batch(0)
    ours, wanted = same_model(theirs)(tokens), theirs(input_ids=tokens, use_cache=False).logits
    assert distance(ours, wanted) <= 3e-5


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
@pytest.mark.parametrize("family", ENCODERS)
def test_dropout_of_encoders_is_where_it_is_there(family: str, name: str) -> None:
    ours, theirs, given, _ = encoders(family, 3, **{name: 1.0})
    y, wanted = ours(*given.values()), theirs(**given).last_hidden_state
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    ours.eval()
    assert not torch.allclose(ours(*given.values()), y)


# What transformers looks up in a configuration, or may, and no result depends on: here, as it is
# of training, of a cache or of another head; or in the configurations that are accepted.
IRRELEVANT = set(
    "_attn_implementation use_cache num_labels problem_type get_text_config router_aux_loss_coef "
    # Of other models in the file.
    "classifier_dropout hidden_dropout image_token_id mm_tokens_per_image text_config "
    "vision_config "
    "summary_first_dropout summary_last_dropout summary_proj_to_labels summary_use_proj "
    "summary_activation summary_type encoder_stride pooler_act pooler_output_size "
    # How to compute the same.
    "reorder_and_upcast_attn chunk_size_feed_forward is_encoder_decoder".split()
)
# Read for others, and without an effect in the model of this type.
WITHOUT_EFFECT = {"GPT2": {"pad_token_id"}}


class Watched:
    """A configuration that records what is read."""

    def __init__(self, config: Any, read: set[str]) -> None:
        self.config, self.read = config, read

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS])
def test_every_attribute_that_a_model_reads_is_read(family: str) -> None:
    """So that one that a later version adds is noticed."""
    made: Any = {"Bert": EncoderConfig, "ViT": ImageEncoderConfig}.get(family, DecoderConfig)
    read: set[str] = set()
    for seed in SEEDS:
        sizes = sample_encoder(family, seed) if family in ENCODERS else sample(family, seed)
        config = getattr(hf, f"{family}Config")(**sizes)
        made.from_hf(Watched(config, read))
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    source = inspect.getsource(importlib.import_module(module))
    there = set(re.findall(r"config\.([a-z_]+)", source))
    there |= set(re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", source))
    unread = there - read - IRRELEVANT - WITHOUT_EFFECT.get(family, set())
    synonyms = config.attribute_map
    assert not unread - {n for n, other in synonyms.items() if other in read}


def test_heads_of_images_that_are_not_a_share_of_the_features() -> None:
    config = hf.ViTConfig(**test_image_encoder.VIT, head_dim=8)
    with pytest.raises(NotSupportedError, match=r"of a vit\). Received: head_dim=8"):
        ImageEncoderConfig.from_hf(config)


def test_the_base_that_a_family_has_by_default() -> None:
    values = hf.MixtralConfig(**SIZES).to_dict()
    values.pop("rope_parameters")
    assert DecoderConfig.from_hf(SimpleNamespace(**values)).rope_base == 1e6


@pytest.mark.parametrize(
    ("hidden_act", "hidden_activation", "wanted"),
    [
        ("gelu_pytorch_tanh", None, "geglu"),
        ("silu", "silu", "swiglu"),
        ("gelu_pytorch_tanh", "silu", None),
        ("silu", None, None),
    ],
)
def test_gemma_of_transformers_4(
    hidden_act: str, hidden_activation: str | None, wanted: str | None
) -> None:
    """Early versions read one name of the activation, later ones the other."""
    values = hf.GemmaConfig(**SIZES, head_dim=8).to_dict()
    values.pop("rope_parameters")
    values |= {"hidden_act": hidden_act, "hidden_activation": hidden_activation}
    config = SimpleNamespace(**values, rope_theta=1e4, rope_scaling=None)
    if wanted is not None:
        assert DecoderConfig.from_hf(config).activation == wanted
        return
    text = f"hidden_act='{hidden_act}', hidden_activation={hidden_activation!r}"
    with pytest.raises(NotSupportedError, match=text):
        DecoderConfig.from_hf(config)


@pytest.mark.parametrize("hidden_act", ["silu", "gelu_pytorch_tanh"])
def test_gemma_of_transformers_5_computes_hidden_act(hidden_act: str) -> None:
    """Also by :func:`opfuser.hf.apply`, which leaves the embedding and its factor to the model."""
    other = "silu" if hidden_act != "silu" else "gelu_pytorch_tanh"
    sizes = {**SIZES, "head_dim": 8, "hidden_act": hidden_act, "hidden_activation": other}
    theirs: Any = hf_model("Gemma", sizes)
    data = batch(0)
    wanted = run_hf(theirs, *data)
    compare(run(same_model(theirs), *data), wanted, hidden_act)
    theirs.zero_grad()
    assert opfuser.hf.apply(theirs).computed
    compare(run_hf(theirs, *data), wanted, hidden_act)
    theirs.to(torch.bfloat16)
    with torch.no_grad():
        first = theirs(input_ids=data[0], output_hidden_states=True).hidden_states[0]
        assert torch.equal(first, same_model(theirs, dtype=torch.bfloat16)[:2](data[0]))

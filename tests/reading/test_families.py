"""What is read of a layer computes the same as the layer, over families of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opfuser.applying.descriptions import children_called
from opfuser.reading.construction import build
from opfuser.reading.kept import KeptError

from .families import VISION, layer_of, own_blocks, stream
from .recomputed import Example, assert_recomputed, read_of
from .tiny import WIDTH, model_of, randomized

DECODERS = """arcee biogpt cohere cohere2 ernie4_5 exaone4 gemma gemma3_text glm glm4 gpt2 gpt_neox
    granite helium hunyuan_v1_dense llama mistral nemotron olmo olmo2 opt phi phi3 qwen2 qwen3
    seed_oss smollm3 stablelm starcoder2""".split()
ENCODERS = "albert bert distilbert electra esm roberta xlm-roberta".split()
OWN = own_blocks()


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS, *sorted(VISION)])
def test_a_layer_is_read_whole(family: str) -> None:
    assert_recomputed(layer_of(model_of(family).eval()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi", "qwen3"])
def test_attention_as_products_with_a_mask_is_read_whole(family: str) -> None:
    assert_recomputed(layer_of(model_of(family, "eager").eval()))


def test_a_layer_that_is_not_explained_is_kept_with_the_reason() -> None:
    layer = layer_of(model_of("modernbert").eval())
    with pytest.raises(KeptError, match="opfuser has no operation that gates by gelu"):
        build(read_of(layer), layer.module)


def test_attention_to_another_input_by_torch_is_called() -> None:
    decoder = nn.TransformerDecoderLayer(WIDTH, 4, 48, 0.0, batch_first=True)
    given = stream().requires_grad_(), stream().requires_grad_()
    reading = assert_recomputed(Example(randomized(decoder), given), whole=False)
    ((path, reason),) = children_called(reading)
    assert path == "multihead_attn"
    # Of a part of a weight.
    assert reason == "computes linear in 'multihead_attn', which attention reads"


@pytest.mark.parametrize("name", OWN)
def test_a_block_of_ones_own_is_read_whole(name: str) -> None:
    torch.manual_seed(0)
    assert_recomputed(OWN[name])

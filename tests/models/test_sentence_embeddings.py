"""Embeddings of sentences by a BERT of MiniLM's size, from a checkpoint to their training.

The weights are random: what is promised holds for any, and nothing is downloaded.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opfuser.hf
from opfuser.models import (
    EncoderConfig,
    attention_kwargs,
    hf_state_dict,
    load_hf,
    text_encoder,
)
from tests.models.hf import distance, transformers

safetensors = pytest.importorskip("safetensors.torch", reason="reads a checkpoint")

# all-MiniLM-L6-v2, but for the vocabulary.
SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
# Questions and their answers.
SENTENCES = [
    "Where does the cat sleep?",
    "When does the last train to the coast leave, and does it stop at the airport on Sundays?",
    "Who wrote this?",
    "Why is bread dough left alone for an hour before it is baked?",
    "On the warm windowsill, between two pots of basil and a radio that nobody has repaired yet.",
    "At half past nine, unless it snows.",
    "A teacher from a village near the border, whose other books were never printed.",
    "So that it rises.",
]


class Batch(NamedTuple):
    """Sentences of different lengths, padded on the right."""

    input_ids: Tensor
    token_type_ids: Tensor
    attention_mask: Tensor


class Results(NamedTuple):
    """Embeddings, and the gradients of training with them by the names of transformers."""

    embeddings: Tensor
    grads: dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models and tokenizers, as ``from_pretrained`` reads them."""
    return [checkpoint(tmp_path_factory.mktemp("minilm"), seed) for seed in range(5)]


def checkpoint(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.05)  # scores of attention differ by about 1
            else:
                p.uniform_(-0.2, 0.2).add_(0.0 if name.endswith("bias") else 1.0)
    model.save_pretrained(folder)
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    empty = transformers.BertTokenizer(vocab={word: n for n, word in enumerate(special)})
    tokenizer = empty.train_new_from_iterator(
        [SENTENCES], vocab_size=SIZES["vocab_size"], show_progress=False
    )
    tokenizer.save_pretrained(folder)
    return folder


def tokenized(folder: Path) -> Batch:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = Batch(**tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    lengths = batch.attention_mask.sum(1)
    assert len(lengths.unique()) == len(SENTENCES)
    assert int((batch.input_ids == tokenizer.unk_token_id).sum()) == 0
    return batch


def embedded(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens of each sentence, of length 1."""
    counted = mask[..., None].to(hidden.dtype)
    return F.normalize((hidden * counted).sum(1) / counted.sum(1), dim=1)


def results(
    hidden: Callable[[Batch], Tensor], batch: Batch, grads: Callable[[], dict[str, Tensor]]
) -> Results:
    """Of a contrastive loss: each question has to find its answer among all."""
    embeddings = embedded(hidden(batch), batch.attention_mask)
    questions, answers = embeddings.chunk(2)
    loss = F.cross_entropy(20 * questions @ answers.t(), torch.arange(len(questions)))
    loss.backward()
    return Results(embeddings.detach(), grads())


def of_theirs(model: Any, batch: Batch) -> Results:
    def grads() -> dict[str, Tensor]:
        return {n: p.grad for n, p in model.named_parameters() if not n.startswith("pooler")}

    return results(lambda b: model(**b._asdict()).last_hidden_state, batch, grads)


def of_encoder(folder: Path, batch: Batch) -> Results:
    """``text_encoder``, with the tensors of the file."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = text_encoder(EncoderConfig.from_hf(config)).eval()
    load_hf(model, safetensors.load_file(folder / "model.safetensors"))
    kwargs = attention_kwargs(model, mask=batch.attention_mask.bool())

    def grads() -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        with torch.no_grad():
            for p, q in zip(own.parameters(), model.parameters()):
                p.copy_(q.grad)  # type: ignore[arg-type]
        return hf_state_dict(own)

    return results(lambda b: model(b.input_ids, b.token_type_ids, op_kwargs=kwargs), batch, grads)


def of_applied(folder: Path, batch: Batch) -> Results:
    """Their model, its layers replaced."""
    model = transformers.BertModel.from_pretrained(folder)
    report = opfuser.hf.apply(model)
    assert sum(entry.path.rpartition(".")[2].isdigit() for entry in report.computed) == 6
    got = of_theirs(model, batch)
    assert not any(entry.fell_back for entry in opfuser.hf.report(model).computed)
    return got


@pytest.mark.slow
@pytest.mark.parametrize("way", [of_encoder, of_applied])
def test_embeddings_and_the_gradients_of_training(
    way: Callable[[Path, Batch], Results], checkpoints: list[Path]
) -> None:
    """Errors are those of several models: of one, that of a single bias is a matter of luck, as
    it sums gradients that all carry the rounding of the same few embeddings."""
    ours, theirs = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for checkpoint in checkpoints:
        batch = tokenized(checkpoint)
        untouched = transformers.BertModel.from_pretrained(checkpoint)
        exact = of_theirs(copy.deepcopy(untouched).double(), batch)
        want = of_theirs(untouched, batch)
        got = way(checkpoint, batch)
        assert (got.embeddings - want.embeddings).abs().max() <= 1e-5
        assert got.grads.keys() == exact.grads.keys()
        for name, grad in exact.grads.items():
            if name.endswith("key.bias"):  # zero: the softmax of scores ignores what all share
                assert max(grad.norm(), got.grads[name].norm()) < 1e-7
                continue
            assert grad.norm() > 1e-5, f"{name} tells nothing"
            ours[name].append(distance(got.grads[name], grad))
            theirs[name].append(distance(want.grads[name], grad))
    for name in ours:
        assert math.hypot(*ours[name]) <= 2 * math.hypot(*theirs[name]), name

"""Text for finetune_hf.py: a tokenizer, and rows that hold several documents each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from lm_data import is_held_out, source_files
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|end|>"
IGNORED = -100  # no loss for this label, by the convention of torch and transformers
_MERGES_FROM = 4_000_000  # characters: enough for a vocabulary of some thousand


class Documents(NamedTuple):
    """Texts to train on, and texts that are held out."""

    train: list[str]
    validation: list[str]


def read_documents(paths: Sequence[Path]) -> Documents:
    """Reads files, and all files within folders; the standard library's sources without any."""
    files = source_files() if not paths else {}
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        files |= {str(file): file for file in inside if file.is_file()}
    parts = Documents([], [])
    for name, file in files.items():
        text = file.read_text(errors="replace")
        (parts.validation if is_held_out(name) else parts.train).append(text)
    if not parts.train:
        raise SystemExit(f"--text: there are no files to train on in {', '.join(map(str, paths))}")
    # Few files may all be for training.
    return parts if parts.validation else Documents(parts.train, parts.train[-1:])


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of its own for a model that has none."""

    def some() -> Iterator[str]:
        count = 0
        for text in texts:
            yield text
            count += len(text)
            if count > _MERGES_FROM:
                return

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(
        some(), vocab_size=vocabulary, special_tokens=[END], show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token=END, pad_token=END)


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of ``length`` tokens, cut from documents that follow each other without padding.

    ``position_ids`` count from 0 in each document, from which transformers makes the mask that
    separates documents of a row; the first token of a document is nothing that the one before
    could predict, so that its label is :data:`IGNORED`.

    Args:
        texts: documents; each is ended by ``tokenizer.eos_token``.
        length: of a row; tokens that do not fill the last one are left out.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
    ) -> None:
        ends = [tokenizer.eos_token_id]
        encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        tokens = torch.tensor([token for ids in encoded for token in (*ids, *ends)])
        lengths = torch.tensor([len(ids) + 1 for ids in encoded])
        starts = lengths.cumsum(0) - lengths
        places = torch.arange(len(tokens)) - starts.repeat_interleave(lengths)
        rows = len(tokens) // length
        if rows == 0:
            raise SystemExit(f"{len(tokens)} tokens of text do not fill one row of {length}")
        self.tokens, self.places = (t[: rows * length].view(rows, length) for t in (tokens, places))
        # The part of a document that a row begins with counts from 0 as well: positions are
        # relative to what can be attended to, and no row exceeds what the model was made for.
        within = torch.arange(length).expand(rows, length)
        begun = torch.where(self.places == 0, within, 0).cummax(1).values
        self.places = within - begun

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, places = self.tokens[index], self.places[index]
        labels = tokens.masked_fill(places == 0, IGNORED)
        return {"input_ids": tokens, "position_ids": places, "labels": labels}

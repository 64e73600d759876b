"""Text for train_lm.py: the source files of the running Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Not part of the library itself; some distributions leave the tests out.
_LEFT_OUT = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test"))
# One of so many files is held out.
_HELD_OUT = 16
END_OF_FILE = b"\0"


class Corpus(NamedTuple):
    """Bytes (uint8, 1-d) of the files to train on and of those held out."""

    train: Tensor
    validation: Tensor


class Batch(NamedTuple):
    """Bytes and, at each place, the byte that follows; both (batch, sequence) of int64."""

    tokens: Tensor
    targets: Tensor


def source_files() -> dict[str, Path]:
    """The library's source files by their path inside it, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return {name: names[name] for name in sorted(names) if not _LEFT_OUT & set(name.split("/"))}


def is_held_out(name: str) -> bool:
    """Whether a file is for validation: by its name alone, so that every run agrees."""
    return zlib.crc32(name.encode()) % _HELD_OUT == 0


def load_corpus() -> Corpus:
    """Reads all source files; each ends with a zero byte."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, path in source_files().items():
        parts[is_held_out(name)] += [path.read_bytes(), END_OF_FILE]
    train, validation = (
        torch.frombuffer(bytearray(b"".join(parts[held_out])), dtype=torch.uint8)
        for held_out in (False, True)
    )
    return Corpus(train, validation)


def _windows(text: Tensor, starts: Tensor, sequence: int) -> Batch:
    windows = text[starts[:, None] + torch.arange(sequence + 1)].long()
    return Batch(windows[:, :-1], windows[:, 1:])


def training_batch(text: Tensor, batch: int, sequence: int, seed: int, step: int) -> Batch:
    """Windows at random places, a function of ``seed`` and ``step``: any step can be redone.

    The generator is seeded at each step; nothing has to be stored in between.
    """
    # Only the low 32 bits of a seed count.
    random = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)
    starts = torch.randint(len(text) - sequence, (batch,), generator=random)
    return _windows(text, starts, sequence)


def validation_batches(text: Tensor, batch: int, sequence: int, count: int) -> list[Batch]:
    """``count`` batches of windows, spread evenly over the text: the same ones at every call."""
    starts = torch.linspace(0, len(text) - sequence - 1, batch * count).long()
    return [_windows(text, part, sequence) for part in starts.split(batch)]

"""Plain torch on a CPU, made to work on small tensors block by block."""

from __future__ import annotations

import pytest
import torch

from opfuser.kernels import (
    cpu_blocks,
    cross_entropy_plain,
    norm_plain,
    rotary_plain,
)


def small_blocks(monkeypatch: pytest.MonkeyPatch, elements: int = 50) -> None:
    """Blocks of so many elements, or of a row."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(cpu_blocks, "BLOCK", elements)
    # Tensors of several of the blocks that users get would take each test a second.
    for module in (norm_plain, rotary_plain, cross_entropy_plain):
        size = {"cpu": elements} if module is cross_entropy_plain else elements
        monkeypatch.setattr(module, "_BLOCK", size)
    monkeypatch.setattr(rotary_plain, "_MIN_BLOCKS", 1)

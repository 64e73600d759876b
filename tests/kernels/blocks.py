"""Plain torch on a CPU, made to work on small tensors block by block."""

from __future__ import annotations

import pytest
import torch

from opfuser.kernels import (
    activation_plain,
    cpu_blocks,
    cross_entropy_plain,
    norm_plain,
    rotary_plain,
)

ELEMENTS = 50


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 50 elements, or a row."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(cpu_blocks, "BLOCK", ELEMENTS)
    monkeypatch.setattr(norm_plain, "_BLOCK", ELEMENTS)
    monkeypatch.setattr(rotary_plain, "_BLOCK", ELEMENTS)
    monkeypatch.setattr(cross_entropy_plain, "_BLOCK", {"cpu": ELEMENTS})
    for module in (activation_plain, rotary_plain):
        monkeypatch.setattr(module, "_MIN_BLOCKS", 1)

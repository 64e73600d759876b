"""Rotary embedding and QK-norm in the shapes of real models, and the bytes that they must move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from opfuser.kernels.rotary import (
    NormedHeads,
    QKNormGrads,
    Rotation,
    qk_norm,
    qk_norm_backward,
    rotary,
)


class Model(NamedTuple):
    """Heads of a model, and tokens of a call."""

    queries: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype = torch.bfloat16
    interleaved: bool = False
    batch: int = 2
    length: int = 4096

    @property
    def heads(self) -> int:
        return self.queries + 2 * self.kv_heads

    @property
    def active(self) -> int:
        return self.queries + self.kv_heads

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def packed(self) -> Tensor:
        shape = (self.batch, self.length, self.heads * self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def rotation(self) -> Rotation:
        cos, sin = torch.empty(2, self.length, self.rotary_dim // 2, device="meta")
        return Rotation(cos, sin, self.length, self.interleaved)

    def weights(self) -> tuple[Tensor, Tensor]:
        q, k = torch.empty(2, self.head_dim, dtype=self.dtype, device="meta")
        return q, k

    @property
    def row_bytes(self) -> int:
        return self.heads * self.head_dim * self.dtype.itemsize

    @property
    def table_bytes(self) -> int:
        return self.length * self.rotary_dim * 4


def turn(model: Model, back: bool) -> Tensor:
    return rotary(model.packed(), model.rotation(), model.kv_heads, model.head_dim, back)


def norm(model: Model, turned: bool, zero_centered: bool = False) -> NormedHeads:
    rotation = model.rotation() if turned else None
    rest = (rotation, model.kv_heads, 1e-6, zero_centered)
    return qk_norm(model.packed(), *model.weights(), *rest)


def norm_backward(model: Model, turned: bool, zero_centered: bool = False) -> QKNormGrads:
    rstd = torch.empty(model.batch, model.length, model.active, device="meta")
    rest = (rstd, model.rotation() if turned else None, zero_centered, True, True)
    return qk_norm_backward(model.packed(), model.packed(), *model.weights(), *rest)


LLAMA_8B = Model(32, 8, 128, 128)
QWEN3_8B = Model(32, 8, 128, 128)
GEMMA3_4B = Model(8, 4, 256, 256)
GPT_J = Model(16, 16, 256, 64, interleaved=True, batch=4, length=2048)
GLM4_9B = Model(32, 2, 128, 64, interleaved=True)
PYTHIA_410M = Model(16, 16, 64, 16, batch=4, length=2048)
GPT2_SIZED = Model(12, 12, 64, 64, batch=8, length=1024)

LAUNCHES: dict[str, Callable[[], object]] = {}
TRAFFIC: dict[str, int] = {}


def _ship(name: str, call: Callable[[], object], row: int, table: int) -> None:
    """``row`` bytes per token, and tables that each are read once."""
    LAUNCHES[name] = call
    TRAFFIC[name] = row + table


for _name, _model in {
    "Llama 8B": LLAMA_8B,
    "Llama 8B, fp32": LLAMA_8B._replace(dtype=torch.float32),
    "GPT-J": GPT_J,
    "Pythia 410M": PYTHIA_410M,
    "GPT-2 sized": GPT2_SIZED,
}.items():
    for _back in (False, True):
        _ship(
            f"{_name}, turned {'back' if _back else 'forward'}",
            partial(turn, _model, _back),
            2 * _model.row_bytes * _model.tokens,
            _model.table_bytes,
        )

for _name, _model, _turned in (
    ("Qwen3 8B", QWEN3_8B, True),
    ("Qwen3 8B, no positions", QWEN3_8B, False),
    ("Qwen3 8B, fp32", QWEN3_8B._replace(dtype=torch.float32), True),
    ("Gemma 3 4B", GEMMA3_4B, True),
    ("interleaved and partial", GLM4_9B, True),
):
    _table = _model.table_bytes * _turned
    _ship(
        f"{_name}, norm",
        partial(norm, _model, _turned),
        2 * _model.row_bytes * _model.tokens,
        _table,
    )
    # Tensors count whole; the values in the input are not read, in fact.
    _ship(
        f"{_name}, norm backward",
        partial(norm_backward, _model, _turned, _model is GEMMA3_4B),
        3 * _model.row_bytes * _model.tokens,
        _table,
    )

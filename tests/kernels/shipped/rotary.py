"""Rotary embedding and QK-norm in the shapes of real models, and the bytes that they must move."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from opfuser.kernels.rotary import qk_norm, qk_norm_backward, rotary
from opfuser.kernels.rotary_plain import Rotation
from tests.kernels.shipping import Family, Shipped, empty


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
    turned: bool = True

    def packed(self) -> Tensor:
        heads = self.queries + 2 * self.kv_heads
        return empty(self.batch, self.length, heads * self.head_dim, dtype=self.dtype)

    def rotation(self) -> Rotation | None:
        cos, sin = empty(2, self.length, self.rotary_dim // 2, dtype=torch.float32)
        return Rotation(cos, sin, self.length, self.interleaved) if self.turned else None

    def weights(self) -> Tensor:
        return empty(2, self.head_dim, dtype=self.dtype)


def turn(model: Model, *, back: bool = False) -> object:
    return rotary(model.packed(), model.rotation(), model.kv_heads, model.head_dim, back)


def norm(model: Model) -> object:
    rest = model.rotation(), model.kv_heads, 1e-6, False
    return qk_norm(model.packed(), *model.weights(), *rest)


def norm_backward(model: Model, *, zero_centered: bool = False) -> object:
    normed = model.queries + model.kv_heads
    rstd = empty(model.batch, model.length, normed, dtype=torch.float32)
    rest = rstd, model.rotation(), zero_centered, True, True
    return qk_norm_backward(model.packed(), model.packed(), *model.weights(), *rest)


SHIPPED = Family()


def ship(name: str, passes: int, call: partial[object], model: Model) -> None:
    """``call`` reads or writes all heads so often, and each table once."""
    tables = model.length * model.rotary_dim * 4 * model.turned
    SHIPPED[name] = Shipped(partial(call, model), passes * model.packed().nbytes + tables)


LLAMA_8B = QWEN3_8B = Model(32, 8, 128, 128)
for name, model in {
    "Llama 8B": LLAMA_8B,
    "Llama 8B, fp32": LLAMA_8B._replace(dtype=torch.float32),
    "GPT-J": Model(16, 16, 256, 64, interleaved=True, batch=4, length=2048),
    "Pythia 410M": Model(16, 16, 64, 16, batch=4, length=2048),
    "Llama 8B, queries alone": LLAMA_8B._replace(kv_heads=0),
    "GPT-2 sized": Model(12, 12, 64, 64, batch=8, length=1024),
}.items():
    ship(f"{name}, turned forward", 2, partial(turn), model)
    ship(f"{name}, turned back", 2, partial(turn, back=True), model)
for name, model in {
    "Qwen3 8B": QWEN3_8B,
    "Qwen3 8B, no positions": QWEN3_8B._replace(turned=False),
    "Qwen3 8B, fp32": QWEN3_8B._replace(dtype=torch.float32),
    "Gemma 3 4B": Model(8, 4, 256, 256),
    "interleaved and partial": Model(32, 2, 128, 64, interleaved=True),
}.items():
    ship(f"{name}, norm", 2, partial(norm), model)
    # Tensors count whole; the values in the input are not read, in fact.
    backward = partial(norm_backward, zero_centered=name == "Gemma 3 4B")
    ship(f"{name}, norm backward", 3, backward, model)

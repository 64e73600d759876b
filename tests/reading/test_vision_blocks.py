"""Blocks as libraries for vision write them: LayerScale, stochastic depth, windows, gated units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser.reading.kept import KeptError

from .families import stream
from .mutations import outcomes_of
from .recomputed import Example, assert_recomputed, called_in, read_of
from .tiny import LENGTH, WIDTH, randomized


class LayerScale(nn.Module):
    """A number for each column, in place of the branch's if asked for."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.gamma, self.inplace = nn.Parameter(torch.full((WIDTH,), 1e-5)), inplace

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class DropPath(nn.Module):
    """Leaves out a branch for samples that are drawn, and scales it for the others."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        drawn = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        if keep > 0.0:
            drawn.div_(keep)
        return x * drawn


class Attention(nn.Module):
    """One projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        return self.drop(self.proj(y.transpose(1, 2).reshape(b, n, c)))


def feed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))


class PackedGate(nn.Module):
    """A gated unit whose two projections are one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 96), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class Block(nn.Module):
    """x + path(scale(attention(norm(x)))), then the same with a feed-forward network."""

    def __init__(self, mlp: nn.Module | None = None, p: float = 0.1, inplace: bool = False) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(WIDTH), Attention(), LayerScale(inplace)
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(WIDTH), mlp or feed(), LayerScale(inplace)
        self.path1, self.path2 = DropPath(p), DropPath(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.path2(self.ls2(self.mlp(self.norm2(x))))


class ConvNeXtMlp(nn.Module):
    """What ConvNeXt computes behind its convolution, with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH, eps=1e-6), feed()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.mlp(self.norm(x))


class Swin(nn.Module):
    """A block of windows of 2 x 2 in an image of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), feed()

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        parts = self.norm1(x).view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5)
        y = self.attn(parts.reshape(-1, 4, c)).view(b, h // 2, w // 2, 2, 2, c)
        x = x + y.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + self.mlp(self.norm2(x))


def example(module: nn.Module, *shape: int) -> Example:
    torch.manual_seed(0)
    return Example(randomized(module), (stream(*shape).requires_grad_(),))


WHOLE: dict[str, Any] = {
    "ViT": Block,
    "scales in place": lambda: Block(inplace=True),
    "packed gate": lambda: Block(PackedGate()),
    "ConvNeXt": ConvNeXtMlp,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_block_is_read_whole(name: str) -> None:
    assert_recomputed(example(WHOLE[name]().eval()))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_stochastic_depth_that_draws_nothing(p: float) -> None:
    reading = assert_recomputed(example(Block(p=p).train()), whole=False)
    assert called_in(reading) == (["path1", "path2"] if p else [])


def test_stochastic_depth_in_training_is_called() -> None:
    found = example(Block().train())
    assert sorted(called_in(read_of(found))) == ["path1", "path2"]


def test_windows_are_kept() -> None:
    with pytest.raises(KeptError, match="computes permute"):
        read_of(example(Swin(), 2, 4, 4, WIDTH))


@pytest.mark.parametrize("name", WHOLE)
def test_no_operation_of_a_block_is_overlooked(name: str) -> None:
    assert outcomes_of(example(WHOLE[name]().eval(), 3, LENGTH, WIDTH))["recomputed"] > 0

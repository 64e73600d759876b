"""Any kind of number may be an argument or an attribute; it becomes one that torch takes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opfuser as of

HALF = Fraction(1, 2)
MADE: dict[str, tuple[Callable[[Any], nn.Module], list[str], tuple[int, ...]]] = {
    "ConstantScale": (of.ConstantScale, ["scale"], (3, 8)),
    "Dropout": (of.Dropout, ["dropout_probability"], (3, 8)),
    "Softplus": (lambda v: of.Softplus(v, v), ["beta", "threshold"], (3, 8)),
    "LayerNorm": (lambda v: of.LayerNorm(8, eps=v), ["eps"], (3, 8)),
    "RMSNorm": (lambda v: of.RMSNorm(8, eps=v), ["eps"], (3, 8)),
    "L2Normalization": (lambda v: of.L2Normalization(eps=v), ["eps"], (3, 8)),
    "QKNorm": (lambda v: of.QKNorm(2, 2, num_kv_heads=1, eps=v), ["eps"], (1, 3, 8)),
    "SiTUGLU": (lambda v: of.SiTUGLU(beta1=v, beta2=v), ["beta1", "beta2"], (3, 8)),
    "ClampedSwiGLU": (
        lambda v: of.ClampedSwiGLU(limit=v, alpha=v, glu_linear_offset=v),
        ["limit", "alpha", "glu_linear_offset"],
        (3, 8),
    ),
    "RotaryEmbedding": (
        lambda v: of.RotaryEmbedding(2, 2, num_kv_heads=1, base=v), ["base"], (1, 3, 8),
    ),
    "DotProductAttention": (lambda v: of.DotProductAttention(2, 1, scale=v), ["scale"], (1, 3, 8)),
}  # fmt: skip


def result(op: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    y = op(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *op.parameters()])]


@pytest.mark.parametrize("value", [HALF, np.float32(0.5), np.float64(0.5)], ids=repr)
@pytest.mark.parametrize("kind", MADE)
def test_a_number_of_any_kind(kind: str, value: Any) -> None:
    make, names, shape = MADE[kind]
    x = torch.randn(shape, requires_grad=True)
    expected = result(make(0.5), x)
    given = make(value)
    later = make(0.25)
    for name in names:
        assert isinstance(getattr(given, name), float)
        setattr(later, name, value)
    for op in (given, later):
        torch.testing.assert_close(result(op, x), expected, rtol=0, atol=0)
        if kind != "Dropout":
            torch.testing.assert_close(op.reference(x), expected[0], rtol=1e-5, atol=1e-6)


def test_losses() -> None:
    x, t = torch.randn(3, 8, requires_grad=True), torch.tensor([1, 2, 3])
    exact = of.CrossEntropy(label_smoothing=0.5, z_loss=0.5)
    ours = of.CrossEntropy(label_smoothing=HALF, z_loss=HALF, ignore_index=np.int64(-100))
    assert type(ours.ignore_index) is int
    dx, expected = (torch.autograd.grad(op(x, t), x)[0] for op in (ours, exact))
    assert torch.equal(dx, expected)


def test_flags_and_subclasses_of_numbers_stay_what_they_are() -> None:
    op = of.Identity()
    op.flag, op.size = True, torch.Size([2])
    assert op.flag is True
    assert type(op.size) is torch.Size

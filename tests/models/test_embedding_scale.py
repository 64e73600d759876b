"""The factor on the rows of a token table, which is rounded to their dtype."""

from __future__ import annotations

import pytest
import torch

from opfuser.errors import ArgumentTypeError
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.models.embedding_scale import EmbeddingScale
from opfuser.testing import check_op

# Ties, denormal numbers, and what is out of range.
FACTORS = [3072**0.5, 40**0.5, -5.3, 0.0, 257.0, 259.0, 2.0**-133, 1e-45, 65519.0, 65520.0, 3.4e38,
           1e300, -1e300]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounded_as_a_tensor_is(dtype: torch.dtype) -> None:
    for factor in FACTORS:
        x = torch.tensor([1.0, -1.0], dtype=dtype, requires_grad=True)
        y = EmbeddingScale(factor)(x)
        wanted = torch.tensor(factor, dtype=torch.float64 if dtype == torch.float64 else None)
        assert torch.equal(y, x * wanted.to(dtype)), factor
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx, wanted.to(dtype).expand(2)), factor


def test_contract() -> None:
    check_op(EmbeddingScale(40**0.5), torch.randn(5, 6))


def test_made_on_the_meta_device_and_changed_later() -> None:
    with torch.device("meta"):
        model = decoder_lm(DecoderConfig(7, 8, 1, 2, embedding_scale=40**0.5), with_loss=False)
    op = model.scale
    assert isinstance(op, EmbeddingScale)
    x = torch.ones(3, dtype=torch.bfloat16)
    assert op(x)[0].item() == 6.3125
    op.scale = 3072**0.5
    assert op(x)[0].item() == 55.5


def test_refuses_what_is_no_number() -> None:
    with pytest.raises(ArgumentTypeError, match=r"a real Python number .EmbeddingScale."):
        EmbeddingScale(torch.ones(()))  # type: ignore[arg-type]

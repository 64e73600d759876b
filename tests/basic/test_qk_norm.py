from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser import OperationContext, QKNorm
from opfuser.errors import ArgumentError, InputError
from opfuser.op import GradNeeds
from opfuser.testing import check_op
from tests.basic.values import DTYPES, fill, held_to

VARIANTS: dict[str, dict[str, Any]] = {
    "as many keys": {},
    "grouped": {"num_kv_heads": 2},
    "zero centered": {"num_kv_heads": 1, "zero_centered_gamma": True, "eps": 0.1},
}


def norm_of_each_head(op: QKNorm, x: Tensor) -> Tensor:
    """torch's; values pass as they are."""
    heads = x.unflatten(-1, (-1, op.head_dim))
    q, k, v = heads.split([op.num_heads, op.num_kv_heads, op.num_kv_heads], -2)
    weights = [w + int(op.zero_centered_gamma) for w in op.parameters()]
    normed = [F.rms_norm(t, (op.head_dim,), w, op.eps) for t, w in zip((q, k), weights)]
    return torch.cat((*normed, v), -2).flatten(-2)


def make(variant: str, head_dim: int = 6, **kwargs: Any) -> QKNorm:
    op = fill(QKNorm(4, head_dim, **{**VARIANTS[variant], **kwargs}))
    return held_to(op, norm_of_each_head)


def features(op: QKNorm) -> int:
    return (op.num_heads + 2 * op.num_kv_heads) * op.head_dim


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("rows", "head_dim"), [((2, 7), 6), ((1, 1), 5), ((3,), 33), ((), 4)])
def test_as_exact_as_torch(
    rows: tuple[int, ...], head_dim: int, variant: str, device: torch.device
) -> None:
    op = make(variant, head_dim).to(device)
    x = 3 * torch.randn(*rows, features(op), device=device)
    check_op(op, x, dtypes=DTYPES, zero_rows=bool(rows))
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, x, zero_rows=bool(rows))


def test_starts_as_the_norm_alone() -> None:
    for centered in (False, True):
        op = QKNorm(2, 8, zero_centered_gamma=centered)
        q, k, _ = op(5 * torch.randn(3, 48)).split(16, -1)
        for heads in (q, k):
            mean_square = heads.unflatten(-1, (2, 8)).square().mean(-1)
            torch.testing.assert_close(mean_square, torch.ones(3, 2))
        fill(op).reset_parameters()
        assert op.q_weight.unique().tolist() == [1 - int(centered)]


@pytest.mark.parametrize(
    ("param_dtype", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_parameters_of_another_dtype(
    param_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    op = fill(QKNorm(4, 6, num_kv_heads=2, dtype=param_dtype)).to(device)
    x = torch.randn(9, features(op), device=device).to(dtype)
    check_op(op, x)
    assert op(x).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_layout_also_as_rows(dtype: torch.dtype, device: torch.device) -> None:
    """The input, and one number per row and head in fp32; a fusion may save both as rows."""
    op = make("grouped").to(device=device, dtype=dtype)
    x, dy = torch.randn(2, 5, 3, features(op), device=device).to(dtype)
    ctx = OperationContext()
    ctx.needs = GradNeeds(True, (True, True), ())
    op.op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    assert ctx.to_save is not None
    saved, rstd = ctx.to_save
    assert saved is x
    assert rstd is not None
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    heads = x.double().unflatten(-1, (-1, op.head_dim))[:, :, : op.num_heads + op.num_kv_heads]
    expected = torch.rsqrt(heads.square().mean(-1) + op.eps)
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-5, atol=1e-5)
    ctx.parameters = tuple(p.detach() for p in op.parameters())
    results = []
    for tensors in (ctx.to_save, (x.view(15, -1), rstd.view(15, -1))):
        ctx.saved_tensors = tensors
        dx, grads = op.op_backward(ctx, dy)
        assert dx is not None
        assert dx.shape == x.shape
        results.append((dx, *grads))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 3, 47), ()], ids=str)
def test_refuses_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"must be \(..., 48\) \(QKNorm\(num_heads=4.*Received"):
        make("grouped")(torch.ones(shape))


def test_refuses_heads_without_entries() -> None:
    with pytest.raises(ArgumentError, match=r"head_dim must be positive \(QKNorm\).*head_dim=0"):
        QKNorm(2, 0)

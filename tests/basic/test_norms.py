from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser import L2Normalization, LayerNorm, QKNorm, RMSNorm
from opfuser.errors import ArgumentError, InputError
from opfuser.kernels.launch import INTERPRETED
from opfuser.testing import check_op
from tests.basic.values import DTYPES, EXACT, HALF, after_forward, check_values, fill, held_to

AFFINE = [LayerNorm, RMSNorm]


def weight_of(op: Any) -> Tensor:
    return 1 + op.weight if op.zero_centered_gamma else op.weight


def layer_norm(op: LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, op.normalized_shape, weight_of(op), op.bias, op.eps)


def rms_norm(op: RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, op.normalized_shape, weight_of(op), op.eps)


def l2_norm(op: L2Normalization, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + op.eps)


def made(name: str, shape: Any, **options: Any) -> Any:
    """A norm with random parameters, held to torch's own."""
    if name == "L2":
        return held_to(L2Normalization(**options), l2_norm)
    if name == "LayerNorm without bias":
        op = fill(LayerNorm(shape, **options))
        op.bias = None
        return held_to(op, layer_norm)
    if name == "LayerNorm":
        return held_to(fill(LayerNorm(shape, **options)), layer_norm)
    return held_to(fill(RMSNorm(shape, **options)), rms_norm)


CENTERED = {"zero_centered_gamma": True}


@pytest.mark.parametrize(
    ("shape", "normalized", "options"),
    [
        ((5, 257), 257, {}),
        ((7, 33), 33, CENTERED),
        ((2, 3, 8), [8], {"eps": 0.1, **CENTERED}),
        ((4, 3, 5), (3, 5), {"eps": 0.1}),
        ((4, 3, 5), (3, 5), CENTERED),
        ((6,), 6, {}),
        ((3, 2), 2, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["LayerNorm", "LayerNorm without bias", "RMSNorm"])
def test_as_the_formula(
    name: str, shape: tuple[int, ...], normalized: Any, options: Any, device: torch.device
) -> None:
    op = made(name, normalized, **options).to(device)
    x = 3 * torch.randn(shape, device=device)
    check_op(op, x, dtypes=DTYPES, zero_rows=x.dim() > len(op.normalized_shape))
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, x, zero_rows=x.dim() > len(op.normalized_shape))


@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 8), (6,), (3, 2)], ids=str)
def test_l2_as_the_formula(shape: tuple[int, ...], device: torch.device) -> None:
    for eps in (1e-6, 0.5):
        op, x = made("L2", (), eps=eps), 3 * torch.randn(shape, device=device)
        check_op(op, x, dtypes=DTYPES)
        with torch.autocast(device.type, torch.bfloat16):
            check_op(op, x)


@pytest.mark.parametrize("cls", AFFINE)
def test_as_exact_as_torch(cls: Any, device: torch.device) -> None:
    """Also where a CPU computes in blocks of rows."""
    op = made(cls.__name__, 96).to(device)
    x = torch.randn(2**17 * torch.get_num_threads() // 96 + 200, 96, device=device)
    # Triton's interpreter does not round bf16.
    exact = {**EXACT, torch.bfloat16: 2**-7 if INTERPRETED else 0.0}
    check_values(op, x, dtypes=(torch.float32, *HALF), floors=exact)


@pytest.mark.parametrize(
    ("normalized", "dtype"),
    [((8,), HALF[0]), ((8,), torch.float64), ((3, 8), torch.float32), ((3, 8), HALF[1])],
    ids=str,
)
def test_saved_layouts(
    normalized: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """The input, and statistics in fp32, one value per row: what a user's fusion fills in."""
    x = torch.randn(5, 3, 8, device=device).to(dtype)
    dims = tuple(range(-len(normalized), 0))
    variance, mean = torch.var_mean(x.double(), dims, correction=0)
    expected = {
        LayerNorm: [mean, torch.rsqrt(variance + 1e-5)],
        RMSNorm: [torch.rsqrt(x.double().square().mean(dims) + 1e-5)],
    }
    if len(normalized) == 1:
        expected[L2Normalization] = [torch.rsqrt(x.double().square().sum(-1) + 1e-6)]
    for cls, statistics in expected.items():
        op = cls() if cls is L2Normalization else cls(normalized).to(device=device, dtype=dtype)
        saved, *found = after_forward(op, x).saved_tensors
        assert saved is x
        for got, want in zip(found, statistics, strict=True):
            assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", AFFINE)
def test_backward_takes_what_a_fusion_saved_as_rows(cls: Any) -> None:
    op, (x, dy) = fill(cls((3, 8))), torch.randn(2, 5, 2, 3, 8)
    ctx = after_forward(op, x)
    dx, grads = op.op_backward(ctx, dy)
    ctx.saved_tensors = (x.view(10, 24), *(t.reshape(10) for t in ctx.saved_tensors[1:]))
    dx_of_rows, grads_of_rows = op.op_backward(ctx, dy)
    assert dx_of_rows.shape == x.shape
    torch.testing.assert_close((dx_of_rows, *grads_of_rows), (dx, *grads), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "L2"])
def test_rows_of_zeros_and_of_tiny_and_large_numbers(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    op = made(name, 8).to(device=device, dtype=dtype)
    row = torch.randn(8, device=device)
    x = torch.stack((0 * row, 1e-6 * row, 1e4 * row)).to(dtype).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, expected = op(x), copy.deepcopy(op).double().reference(x64)
    dx, dx64 = (torch.autograd.grad(a.sum(), b)[0] for a, b in ((y, x), (expected, x64)))
    rtol = 4 * torch.finfo(dtype).eps
    for got, want in ((y.detach(), expected.detach()), (dx, dx64)):
        for one, other in zip(got.double(), want):
            atol = rtol * float(other.abs().max()) + 1e-6
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("cls", AFFINE)
def test_start(cls: Any) -> None:
    op, centered, x = cls(6), cls(6, zero_centered_gamma=True), torch.randn(3, 6)
    assert op.weight.tolist() == [1] * 6
    assert centered.weight.tolist() == [0] * 6
    torch.testing.assert_close(op(x), centered(x))
    if cls is LayerNorm:
        assert not op.bias.any()
        op.bias = None
        fill(op).reset_parameters()
        assert list(op.state_dict()) == ["weight"]
    assert op.weight.tolist() == [1] * 6


@pytest.mark.parametrize("cls", AFFINE)
def test_normalized_shapes_that_are_refused(cls: Any) -> None:
    for shape in ((), (0,), (4, -1), 0):
        text = rf"one or more positive sizes \({cls.__name__}\)\. Received: \("
        with pytest.raises(ArgumentError, match=text):
            cls(shape)
    for shape in ((3, 5), (4,), (), (3, 4, 2)):
        text = re.escape(f"({cls.__name__}((3, 4), eps=1e-05)). Received: shape {shape}.")
        with pytest.raises(InputError, match=text):
            cls((3, 4))(torch.ones(shape))


def test_l2_input_needs_a_dimension() -> None:
    with pytest.raises(InputError, match=r"\(L2Normalization\)\. Received: a tensor of shape \(\)"):
        L2Normalization()(torch.ones(()))


@pytest.mark.parametrize("cls", AFFINE)
def test_sm_margin_of_zero_is_accepted(cls: Any) -> None:
    cls(4, sm_margin=0)
    cls(4, sm_margin={"forward": 0, "backward": 0, "inference": 0})


# Heads of queries and keys.

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


def of_heads(variant: str, head_dim: int = 6, **kwargs: Any) -> QKNorm:
    op = fill(QKNorm(4, head_dim, **{**VARIANTS[variant], **kwargs}))
    return held_to(op, norm_of_each_head)


def features(op: QKNorm) -> int:
    return (op.num_heads + 2 * op.num_kv_heads) * op.head_dim


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("rows", "head_dim"), [((2, 7), 6), ((1, 1), 5), ((3,), 33), ((), 4)])
def test_heads_as_the_formula(
    rows: tuple[int, ...], head_dim: int, variant: str, device: torch.device
) -> None:
    op = of_heads(variant, head_dim).to(device)
    x = 3 * torch.randn(*rows, features(op), device=device)
    check_op(op, x, dtypes=DTYPES, zero_rows=bool(rows))
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, x, zero_rows=bool(rows))


def test_heads_start_as_the_norm_alone() -> None:
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
def test_heads_and_parameters_of_another_dtype(
    param_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    op = fill(QKNorm(4, 6, num_kv_heads=2, dtype=param_dtype)).to(device)
    x = torch.randn(9, features(op), device=device).to(dtype)
    check_op(op, x)
    assert op(x).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_layout_of_heads_also_as_rows(dtype: torch.dtype, device: torch.device) -> None:
    """The input, and one number per row and head in fp32; a fusion may save both as rows."""
    op = of_heads("grouped").to(device=device, dtype=dtype)
    x, dy = torch.randn(2, 5, 3, features(op), device=device).to(dtype)
    ctx = after_forward(op, x)
    saved, rstd = ctx.saved_tensors
    assert saved is x
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    heads = x.double().unflatten(-1, (-1, op.head_dim))[:, :, : op.num_heads + op.num_kv_heads]
    expected = torch.rsqrt(heads.square().mean(-1) + op.eps)
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-5, atol=1e-5)
    dx, grads = op.op_backward(ctx, dy)
    ctx.saved_tensors = x.view(15, -1), rstd.view(15, -1)
    dx_of_rows, grads_of_rows = op.op_backward(ctx, dy)
    assert dx_of_rows.shape == x.shape
    torch.testing.assert_close((dx_of_rows, *grads_of_rows), (dx, *grads), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 3, 47), ()], ids=str)
def test_shapes_of_heads_that_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"must be \(..., 48\) \(QKNorm\(num_heads=4.*Received"):
        of_heads("grouped")(torch.ones(shape))


def test_heads_without_entries_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"head_dim must be positive \(QKNorm\).*head_dim=0"):
        QKNorm(2, 0)

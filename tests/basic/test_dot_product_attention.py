from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from opfuser import DotProductAttention, Linear, Sequential
from opfuser.basic import dot_product_attention as module
from opfuser.errors import ArgumentError, InputError, OpKwargsError
from opfuser.op import GradNeeds, OperationContext
from opfuser.testing import check_op

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
KERNELS = ["chosen", "fallback", "fallback in blocks"]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that the device offers, and the fallback, which no CPU input needs by itself."""
    if request.param != "chosen":
        monkeypatch.setattr(module, "_choose", lambda *_: "fallback")
    if request.param == "fallback in blocks":
        monkeypatch.setattr(module, "_FALLBACK_SCORES", 1)
    name: str = request.param
    return name


def packed(op: DotProductAttention, batch: int, length: int, dim: int, **kwargs: Any) -> Tensor:
    width = (op.num_heads + 2 * op.num_kv_heads) * dim
    return torch.randn(batch, length, width, **kwargs).requires_grad_()


def plain(op: DotProductAttention, x: Tensor) -> Tensor:
    """What a model in plain PyTorch would write."""
    h, g = op.num_heads, op.num_kv_heads
    q, k, v = x.unflatten(2, (h + 2 * g, -1)).transpose(1, 2).split([h, g, g], dim=1)
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=op.causal, scale=op.scale, enable_gqa=h != g
    )
    return y.transpose(1, 2).flatten(2)


def exact(op: DotProductAttention, x: Tensor) -> Tensor:
    """Row by row, head by head, in fp64."""
    h, g = op.num_heads, op.num_kv_heads
    heads = x.double().unflatten(2, (h + 2 * g, -1))
    scale = heads.shape[-1] ** -0.5 if op.scale is None else op.scale
    columns = []
    for i in range(h):
        q = heads[:, :, i]
        k, v = heads[:, :, h + i * g // h], heads[:, :, h + g + i * g // h]
        scores = torch.einsum("bqd,bkd->bqk", q, k) * scale
        if op.causal:
            later = torch.arange(x.shape[1], device=x.device)
            scores = scores.masked_fill(later > later[:, None], -torch.inf)
        columns.append(scores.softmax(-1) @ v)
    return torch.cat(columns, -1)


def grad_of(y: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(y, x, dy)
    return dx


def assert_as_good_as(ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == truth.shape
    if truth.numel():
        error, allowed = (ours - truth).abs().max(), (theirs - truth).abs().max()
        floor = 4 * torch.finfo(ours.dtype).eps * truth.abs().max()
        assert error <= 2 * allowed + floor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "length", "dim"), [(2, 37, 16), (1, 1, 8), (3, 5, 7)])
@pytest.mark.usefixtures("kernel")
def test_against_float64(
    batch: int,
    length: int,
    dim: int,
    causal: bool,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    op = DotProductAttention(*heads, causal=causal)
    x = packed(op, batch, length, dim, dtype=dtype, device=device)
    x64 = x.detach().double().requires_grad_()
    y, theirs, truth = op(x), plain(op, x), exact(op, x64)
    assert_as_good_as(y.detach(), theirs.detach(), truth.detach())
    dy = torch.randn_like(y)
    dtruth = grad_of(truth, x64, dy.double())
    assert_as_good_as(grad_of(y, x, dy), grad_of(theirs, x, dy), dtruth)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
@pytest.mark.usefixtures("kernel")
def test_no_rows(batch: int, length: int, heads: tuple[int, int], device: torch.device) -> None:
    op = DotProductAttention(*heads)
    x = packed(op, batch, length, 8, device=device)
    y = op(x)
    assert y.shape == (batch, length, 32)
    assert grad_of(y, x, torch.ones_like(y)).shape == x.shape


@pytest.mark.parametrize("scale", [1.0, 0.05])
@pytest.mark.usefixtures("kernel")
def test_scale(scale: float, device: torch.device) -> None:
    op = DotProductAttention(2, scale=scale)
    x = packed(op, 2, 9, 8, dtype=torch.float64, device=device)
    y, truth = op(x), exact(op, x)
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(op.reference(x), truth)
    dy = torch.randn_like(y)
    torch.testing.assert_close(grad_of(y, x, dy), grad_of(truth, x, dy))


@pytest.mark.usefixtures("kernel")
def test_large_scores_do_not_overflow() -> None:
    op = DotProductAttention(2, scale=1.0)
    x = (30 * packed(op, 1, 6, 8)).detach().requires_grad_()
    y, truth = op(x), exact(op, x)
    torch.testing.assert_close(y.double(), truth)
    assert torch.isfinite(grad_of(y, x, torch.ones_like(y))).all()


def test_no_attention_matrix_is_saved() -> None:
    op = DotProductAttention(4, 2)
    x = packed(op, 2, 64, 8)
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        op(x)
    rows = 2 * 64
    assert sum(saved.values()) == 4 * rows * (8 * 8 + 4 * 8 + 4)  # qkv, output, log-sum-exp


def test_computes_in_the_autocast_dtype(device: torch.device) -> None:
    op = DotProductAttention(2)
    x = packed(op, 2, 9, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = op(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, op(x.bfloat16()), rtol=0, atol=0)
    dx = grad_of(y, x, torch.ones_like(y))
    assert dx.dtype == torch.float32
    truth = exact(op, x)
    dtruth = grad_of(truth, x, torch.ones_like(truth))
    torch.testing.assert_close(dx, dtruth, rtol=0.05, atol=0.05)


def test_no_gradient_work_for_an_input_without_gradient() -> None:
    op = DotProductAttention(2)
    x = packed(op, 2, 9, 8).detach()
    assert not op(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(op(x), op.reference(x))


def test_between_linear_layers(device: torch.device) -> None:
    model = Sequential(
        Linear(6, 64, device=device), DotProductAttention(4, 2), Linear(32, 3, device=device)
    )
    x = torch.randn(2, 7, 6, device=device, requires_grad=True)
    first, op, last = model
    expected = F.linear(op.reference(F.linear(x, first.weight, first.bias)), last.weight, last.bias)
    y, dy = model(x), torch.randn(2, 7, 3, device=device)
    wanted = [x, *model.parameters()]
    grads = zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy))
    torch.testing.assert_close(y, expected)
    for grad, truth in grads:
        torch.testing.assert_close(grad, truth)


def test_meta_device() -> None:
    op = DotProductAttention(4, 2)
    x = packed(op, 2, 5, 8, device="meta")
    y = op(x)
    assert y.shape == (2, 5, 32)
    assert grad_of(y, x, torch.empty_like(y)).shape == x.shape


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_gpu_kernels_are_called_as_declared(
    kernel: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schemas and shapes are checked by fake tensors, which need no GPU; numbers are not."""
    monkeypatch.setattr(module, "_choose_for_tracer", lambda *_: kernel)
    dtype = torch.bfloat16
    op, ctx = DotProductAttention(*heads), OperationContext()
    ctx.needs = GradNeeds(True, (), ())
    no_quantizer: Any = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
    with FakeTensorMode():
        x = torch.empty(2, 5, 16 * (4 + 2 * heads[1]), device="cuda", dtype=dtype)
        y = op.op_forward(ctx, x, **no_quantizer)
        ctx.saved_tensors = ctx.to_save
        dx, _ = op.op_backward(ctx, torch.empty_like(y))
    assert dx is not None
    assert (y.shape, y.dtype, dx.shape, dx.dtype) == ((2, 5, 64), dtype, x.shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_kernels(
    kernel: str, causal: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_choose", lambda *_: kernel)
    op = DotProductAttention(*heads, causal=causal)
    x = packed(op, 2, 70, 64, device="cuda", dtype=torch.bfloat16)
    x64 = x.detach().double().requires_grad_()
    y, theirs, truth = op(x), op.reference(x), exact(op, x64)
    assert_as_good_as(y.detach(), theirs.detach(), truth.detach())
    dy = torch.randn_like(y)
    dtruth = grad_of(truth, x64, dy.double())
    assert_as_good_as(grad_of(y, x, dy), grad_of(theirs, x, dy), dtruth)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [5, 64, 256, 264])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_tracers_get_the_kernel_of_eager_calls(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    op = DotProductAttention(*heads)
    x = packed(op, 2, 70, head_dim, device="cuda", dtype=dtype)
    want = module._choose(module._split(x, op.settings), True, 0.5, True)
    with FakeTensorMode() as mode:
        traced = module._split(mode.from_tensor(x), op.settings)
        assert module._choose(traced, True, 0.5, True) == want


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_whole() -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    op = DotProductAttention(4, 2)
    compiled = torch.compile(Sequential(op), backend="aot_eager", fullgraph=True)
    x = packed(op, 2, 9, 8)
    y, expected = compiled(x), op(x)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    torch.testing.assert_close(grad_of(y, x, dy), grad_of(expected, x, dy))


def test_copies() -> None:
    op = DotProductAttention(4, 2, causal=False, scale=0.5)
    x = packed(op, 2, 9, 8)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert repr(twin) == "DotProductAttention(4, 2, causal=False, scale=0.5)"
        torch.testing.assert_close(twin(x), op(x), rtol=0, atol=0)


@pytest.mark.parametrize("heads", [(0, None), (4, 3), (4, 0), (2, 4)])
def test_refuses_arguments(heads: tuple[int, int | None]) -> None:
    with pytest.raises(ArgumentError, match=r"positive multiple of num_kv_heads .*num_heads="):
        DotProductAttention(*heads)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3, 63),
        torch.ones(2, 3, 0),
        torch.ones(3, 64),
        torch.ones(2, 3, 64, dtype=torch.int64),
    ],
)
def test_refuses_inputs(x: Tensor) -> None:
    with pytest.raises(InputError, match=r"sequence, 8 \* head_dim\) \(DotProductAttention\)"):
        DotProductAttention(4, 2)(x)


def test_refuses_keywords() -> None:
    with pytest.raises(OpKwargsError, match="attn_mask"):
        Sequential(DotProductAttention(4, 2))(torch.ones(2, 3, 64), op_kwargs={0: {"attn_mask": 1}})


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("autocast", [False, True])
def test_checked_like_a_users_operation(autocast: bool, device: torch.device) -> None:
    op = DotProductAttention(4, 2)
    x = torch.randn(2, 5, 64, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        check_op(op, x, dtypes=None if autocast else DTYPES, zero_rows=True)

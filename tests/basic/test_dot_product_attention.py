from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from opfuser import DotProductAttention
from opfuser.attention import choice
from opfuser.attention.call import Call, Heads
from opfuser.basic import dot_product_attention as module
from opfuser.errors import InputError
from opfuser.testing import check_op
from tests.basic.attention_packages import few_queries
from tests.basic.values import DTYPES, FOUR_UNITS, HALF, check_values, held_to

HEADS = pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
GPU_KERNELS = pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])


@pytest.fixture(params=["chosen", "blockwise", "one query at a time"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that the device offers, and plain torch, which no such input needs on a CPU."""
    if request.param != "chosen":
        monkeypatch.setattr(module, "choose_plain", lambda *_: "blockwise")
    if request.param == "one query at a time":
        few_queries(monkeypatch)
    name: str = request.param
    return name


def packed(op: DotProductAttention, batch: int, length: int, dim: int, **kwargs: Any) -> Tensor:
    return torch.randn(batch, length, (op.num_heads + 2 * op.num_kv_heads) * dim, **kwargs)


def heads_of(op: DotProductAttention, x: Tensor) -> Heads:
    h, g = op.num_heads, op.num_kv_heads
    return Heads(*x.unflatten(2, (h + 2 * g, -1)).transpose(1, 2).split([h, g, g], dim=1))


def plain(op: DotProductAttention, x: Tensor) -> Tensor:
    """What a model in plain PyTorch would write."""
    h, g = op.num_heads, op.num_kv_heads
    if not x.numel():  # on a GPU, torch returns None
        return 1 * x[..., : x.shape[2] * h // (h + 2 * g)]
    if x.is_cuda:  # where torch has no kernels for others, or they read beside them, or raise
        x = x.contiguous() if x.data_ptr() % 16 == 0 else x.clone().contiguous()
    q, k, v = heads_of(op, x)
    if x.is_cuda and x.dtype == torch.float32:  # for which no kernel of torch's has groups
        k, v = (t.repeat_interleave(h // g, dim=1) for t in (k, v))
        g = h
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=op.causal, scale=op.scale, enable_gqa=h != g
    )
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("heads", "causal", "scale", "shape"),
    [
        ((4, 4), True, None, (2, 19, 16)),
        ((4, 2), False, None, (3, 5, 7)),
        ((6, 1), True, 0.05, (3, 5, 7)),
        ((4, 2), True, 1.0, (64, 1, 8)),
        ((4, 2), True, None, (2, 0, 8)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("kernel")
def test_as_exact_as_torch(
    heads: tuple[int, int],
    causal: bool,
    scale: float | None,
    shape: tuple[int, int, int],
    device: torch.device,
) -> None:
    op = DotProductAttention(*heads, causal=causal, scale=scale)
    check_values(held_to(op, plain), packed(op, *shape, device=device), floors=FOUR_UNITS)


@pytest.mark.usefixtures("kernel")
def test_autocast(device: torch.device) -> None:
    op = DotProductAttention(4, 2)
    x = packed(op, 2, 9, 16, device=device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, x)
        y = op(x)
    torch.testing.assert_close(y, op(x.bfloat16()), rtol=0, atol=0)


@pytest.mark.usefixtures("kernel")
def test_large_scores_do_not_overflow() -> None:
    op = DotProductAttention(2, scale=1.0)
    x = (30 * packed(op, 1, 6, 8)).requires_grad_()
    y = op(x)
    torch.testing.assert_close(y.double(), plain(op, x.double()))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.gpu
@GPU_KERNELS
@pytest.mark.parametrize(("causal", "heads"), [(False, (4, 2)), (True, (4, 4)), (True, (4, 2))])
def test_gpu_kernels(
    kernel: str, causal: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where nothing is forced, empty tensors go to plain torch, and a single key not to cuDNN.
    def choose(x: Any, *_: Any) -> str:
        takes_it = x.q.numel() and (kernel != "cudnn" or x.q.shape[2] > 1)
        return kernel if takes_it else "blockwise"

    monkeypatch.setattr(module, "choose_plain", choose)
    op = DotProductAttention(*heads, causal=causal)
    check_op(op, packed(op, 2, 70, 64, device="cuda"), dtypes=HALF[:1])


@pytest.mark.gpu
@HEADS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [5, 64, 256, 264])
def test_tracers_get_the_kernel_of_eager_calls(
    heads: tuple[int, int], head_dim: int, masked: bool
) -> None:
    op = DotProductAttention(*heads)
    mask = torch.ones(2, 1, 1, 70, device="cuda", dtype=torch.bool) if masked else None
    for dtype in DTYPES:
        x = packed(op, 2, 70, head_dim, device="cuda", dtype=dtype)
        call = Call(not masked, 0.5, mask=mask)
        want = choice.choose_plain(heads_of(op, x), call, True)
        with FakeTensorMode() as mode:
            traced = heads_of(op, mode.from_tensor(x))
            assert choice.choose_plain(traced, call, True) == want


@pytest.mark.parametrize("shape", [(2, 3, 63), (2, 3, 0), (3, 64)], ids=str)
def test_refuses_inputs(shape: tuple[int, ...]) -> None:
    op, text = DotProductAttention(4, 2), r"sequence, 8 \* head_dim\) \(DotProductAttention\)"
    with pytest.raises(InputError, match=text):
        op(torch.ones(shape))
    with pytest.raises(InputError, match=text):
        op(torch.ones(2, 3, 64, dtype=torch.int64))

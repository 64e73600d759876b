from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuser import BasicLinear, OperationContext, QKNorm, Sequential
from opfuser.errors import ArgumentError, ArgumentTypeError, InputError, OpKwargsError
from opfuser.kernels import rotary_plain
from opfuser.op import GradNeeds
from opfuser.testing import check_op

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

VARIANTS: dict[str, dict[str, Any]] = {
    "as many keys": {},
    "grouped": {"num_kv_heads": 2},
    "zero centred": {"num_kv_heads": 1, "zero_centered_gamma": True, "eps": 0.1},
}


def make(variant: str, head_dim: int = 6, **kwargs: Any) -> QKNorm:
    op = QKNorm(4, head_dim, **{**VARIANTS[variant], **kwargs})
    for weight in op.parameters():
        nn.init.normal_(weight)
    return op


def features(op: QKNorm) -> int:
    return (op.num_heads + 2 * op.num_kv_heads) * op.head_dim


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("rows", "head_dim"), [((2, 7), 6), ((1, 1), 5), ((3,), 33), ((), 4)])
def test_values_and_gradients(
    rows: tuple[int, ...], head_dim: int, variant: str, device: torch.device
) -> None:
    op = make(variant, head_dim).to(device)
    x = 3 * torch.randn(*rows, features(op), device=device)
    check_op(op, x, dtypes=DTYPES, zero_rows=bool(rows))


def test_many_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU they are walked in blocks."""
    op = make("grouped", 64).to(device)
    x = torch.randn(2, 301, features(op), device=device)
    check_op(op, x, dtypes=DTYPES)
    monkeypatch.setattr(rotary_plain, "_BLOCK", 2**12)
    assert len(rotary_plain._blocks(x.cpu().view(1, 602, -1, 64))) > 3
    check_op(op, x, dtypes=DTYPES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_is_torchs_norm_of_each_head(variant: str, device: torch.device) -> None:
    op = make(variant, dtype=torch.float64).to(device)
    x = torch.randn(2, 5, features(op), dtype=torch.float64, device=device)
    heads, got = (t.unflatten(-1, (-1, op.head_dim)) for t in (x, op(x)))
    sizes = [op.num_heads, op.num_kv_heads, op.num_kv_heads]
    weights = [w + int(op.zero_centered_gamma) for w in op.parameters()]
    for part, heads_out, w in zip(heads.split(sizes, 2), got.split(sizes, 2), weights):
        torch.testing.assert_close(heads_out, F.rms_norm(part, (op.head_dim,), w, op.eps))
    assert torch.equal(got[:, :, -op.num_kv_heads :], heads[:, :, -op.num_kv_heads :])


def test_starts_as_the_norm_alone() -> None:
    for centred in (False, True):
        op = QKNorm(2, 8, zero_centered_gamma=centred)
        q, k, _ = op(5 * torch.randn(3, 48)).split(16, -1)
        for heads in (q, k):
            mean_square = heads.unflatten(-1, (2, 8)).square().mean(-1)
            torch.testing.assert_close(mean_square, torch.ones(3, 2))
        nn.init.normal_(op.q_weight)
        op.reset_parameters()
        assert op.q_weight.unique().tolist() == [1 - int(centred)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_another_dtype(
    param_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    op = make("grouped", dtype=param_dtype).to(device)
    x = torch.randn(9, features(op), device=device).to(dtype)
    check_op(op, x, zero_rows=True)
    assert op(x).dtype == dtype


def test_autocast(device: torch.device) -> None:
    op = make("grouped").to(device)
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, torch.randn(9, features(op), device=device))
        assert op(torch.randn(9, features(op), device=device)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_layout(dtype: torch.dtype, device: torch.device) -> None:
    op = make("grouped").to(device=device, dtype=dtype)
    x = torch.randn(5, 3, features(op), device=device).to(dtype)
    ctx = OperationContext()
    op.op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    assert ctx.to_save is not None
    saved, rstd = ctx.to_save
    assert saved is x
    assert rstd is not None
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    heads = x.double().unflatten(-1, (-1, op.head_dim))[:, :, : op.num_heads + op.num_kv_heads]
    expected = torch.rsqrt(heads.square().mean(-1) + op.eps)
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-5, atol=1e-5)


def test_backward_takes_what_a_fusion_saved_as_rows() -> None:
    op = make("grouped")
    x, dy = torch.randn(2, 5, 2, features(op))
    ctx = OperationContext()
    ctx.needs = GradNeeds(True, (True, True), ())
    op.op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    assert ctx.to_save is not None
    ctx.parameters = tuple(p.detach() for p in op.parameters())
    results = []
    _, rstd = ctx.to_save
    assert rstd is not None
    for saved in (ctx.to_save, (x.view(10, -1), rstd.view(10, -1))):
        ctx.saved_tensors = saved
        dx, grads = op.op_backward(ctx, dy)
        results.append((dx, *grads))
    assert results[0][0].shape == x.shape
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("input_grad", [True, False])
def test_gradients_that_nobody_needs(input_grad: bool, needs: tuple[bool, bool]) -> None:
    op = make("grouped")
    x = torch.randn(3, features(op))
    ctx = OperationContext()
    ctx.needs = GradNeeds(input_grad, needs, ())
    op.op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    assert ctx.to_save is not None
    ctx.parameters = tuple(p.detach() for p in op.parameters())
    ctx.saved_tensors = ctx.to_save
    dx, grads = op.op_backward(ctx, torch.randn_like(x))
    assert (dx is not None) == input_grad
    assert tuple(grad is not None for grad in grads) == needs


def test_backward_reads_the_weights_of_its_forward() -> None:
    op = make("grouped")
    x = torch.randn(3, features(op), requires_grad=True)
    (expected,) = torch.autograd.grad(op(x).sum(), x)
    y = op(x)
    op.q_weight = nn.Parameter(torch.zeros(op.head_dim))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, expected, rtol=0, atol=0)


def test_a_second_backward() -> None:
    op = make("grouped")
    x = torch.randn(3, features(op), requires_grad=True)
    loss = op(x).square().sum()
    wrt = [x, *op.parameters()]
    first = torch.autograd.grad(loss, wrt, retain_graph=True)
    second = torch.autograd.grad(loss, wrt)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def test_state_dict_and_copies() -> None:
    op = make("zero centred")
    assert list(op.state_dict()) == ["q_weight", "k_weight"]
    x = torch.randn(3, features(op))
    torch.testing.assert_close(copy.deepcopy(op)(x), op(x), rtol=0, atol=0)
    assert repr(op) == (
        "QKNorm(num_heads=4, head_dim=6, num_kv_heads=1, eps=0.1, zero_centered_gamma=True)"
    )


def test_meta_device() -> None:
    op = make("grouped", device="meta")
    assert op(torch.randn(2, 5, features(op), device="meta")).shape == (2, 5, features(op))


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("variant", ["grouped", "zero centred"])
def test_compiled_whole(variant: str) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    op = make(variant, dtype=torch.float64)
    model = Sequential(op)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 7, features(op), dtype=torch.float64).requires_grad_()
    dy = torch.randn_like(x)
    wrt = [x, *op.parameters()]
    results = []
    for run in (compiled, model):
        y = run(x)
        results.append([y.detach(), *torch.autograd.grad(y, wrt, dy)])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)


def test_behind_a_linear(device: torch.device) -> None:
    op = make("grouped").to(device)
    model = Sequential(BasicLinear(8, features(op), device=device), op)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    torch.testing.assert_close(model(x), op.reference(x @ model[0].weight.t()))


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"num_heads": 0, "head_dim": 4}, r"num_heads must be positive \(QKNorm\).*num_heads=0"),
        ({"num_heads": 2, "head_dim": 0}, "head_dim must be positive"),
        ({"num_heads": 2, "head_dim": 4, "num_kv_heads": 0}, "num_kv_heads must be positive"),
        ({"num_heads": 2, "head_dim": 4, "eps": -1.0}, "eps must be finite and not negative"),
        ({"num_heads": 2, "head_dim": 4, "dtype": torch.int64}, "fp16, bf16, fp32 or fp64"),
    ],
)
def test_refuses_arguments(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        QKNorm(**kwargs)


def test_refuses_an_eps_that_is_no_number() -> None:
    with pytest.raises(ArgumentTypeError, match="eps must be a Python number"):
        QKNorm(2, 4, eps="small")  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [torch.ones(2, 3, 47), torch.ones(())])
def test_refuses_shapes(x: Tensor) -> None:
    with pytest.raises(InputError, match=r"must be \(..., 48\) \(QKNorm\(num_heads=4.*Received"):
        make("grouped")(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_refuses_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"fp16, bf16, fp32 or fp64 \(QKNorm\)"):
        make("grouped")(torch.ones(2, 48).to(dtype))


def test_refuses_keywords() -> None:
    with pytest.raises(OpKwargsError, match="positions"):
        Sequential(make("grouped"))(torch.ones(2, 48), op_kwargs={0: {"positions": 1}})

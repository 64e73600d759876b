from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from opfuser import L2Normalization, LayerNorm, OperationContext, RMSNorm, Sequential
from opfuser.errors import (
    ArgumentError,
    ArgumentTypeError,
    InputError,
    NotSupportedError,
    OpKwargsError,
)
from opfuser.kernels.launch import INTERPRETED
from opfuser.op import GradNeeds
from opfuser.testing import check_op

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHER_DTYPES = [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
AFFINE = [LayerNorm, RMSNorm]


def make(cls: Any, shape: Any, **options: Any) -> Any:
    op = cls(shape, **options)
    for parameter in op.parameters():
        nn.init.normal_(parameter)
    return op


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    ("shape", "normalized"),
    [((7, 33), 33), ((1, 5), (5,)), ((2, 3, 8), [8]), ((4, 3, 5), (3, 5)), ((6,), 6), ((3, 2), 2)],
)
@pytest.mark.parametrize("cls", AFFINE)
def test_values_and_gradients(
    cls: Any, shape: tuple[int, ...], normalized: Any, centred: bool, device: torch.device
) -> None:
    op = make(cls, normalized, zero_centered_gamma=centred).to(device)
    x = 3 * torch.randn(shape, device=device)
    check_op(op, x, dtypes=DTYPES, zero_rows=x.dim() > len(op.normalized_shape))


@pytest.mark.parametrize("shape", [(7, 33), (1, 5), (2, 3, 8), (6,), (3, 2)])
def test_l2_values_and_gradients(shape: tuple[int, ...], device: torch.device) -> None:
    x = 3 * torch.randn(shape, device=device)
    check_op(L2Normalization(), x, dtypes=DTYPES, zero_rows=x.dim() > 1)
    check_op(L2Normalization(eps=0.5), x, dtypes=DTYPES)


@pytest.mark.parametrize("rows", [3, 513])
@pytest.mark.parametrize("op", [make(LayerNorm, 257), make(RMSNorm, 257), L2Normalization()])
def test_longer_rows(op: Any, rows: int, device: torch.device) -> None:
    check_op(op.to(device), torch.randn(rows, 257, device=device), dtypes=DTYPES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", AFFINE)
def test_parameters_of_another_dtype(
    cls: Any, param_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    op = make(cls, 16, dtype=param_dtype).to(device)
    x = torch.randn(9, 16, device=device).to(dtype)
    check_op(op, x, zero_rows=True)
    assert op(x).dtype == dtype


@pytest.mark.parametrize("cls", [*AFFINE, L2Normalization])
def test_autocast(cls: Any, device: torch.device) -> None:
    op = (L2Normalization() if cls is L2Normalization else make(cls, 16)).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, torch.randn(9, 16, device=device))
        assert op(torch.randn(9, 16, device=device)).dtype == torch.bfloat16


@pytest.mark.parametrize("dims", [(-1,), (-2, -1)])
@pytest.mark.parametrize("centred", [0, 1])
def test_formulas(dims: tuple[int, ...], centred: int, device: torch.device) -> None:
    x = torch.randn(4, 3, 8, dtype=torch.float64, device=device)
    options = {"eps": 0.1, "zero_centered_gamma": bool(centred)}
    layer = make(LayerNorm, x.shape[dims[0] :], **options).to(x)
    rms = make(RMSNorm, x.shape[dims[0] :], **options).to(x)
    root = torch.sqrt((x * x).mean(dims, keepdim=True) + 0.1)
    torch.testing.assert_close(rms(x), x / root * (centred + rms.weight))
    deviation = x - x.mean(dims, keepdim=True)
    root = torch.sqrt((deviation**2).mean(dims, keepdim=True) + 0.1)
    torch.testing.assert_close(layer(x), deviation / root * (centred + layer.weight) + layer.bias)
    root = torch.sqrt((x * x).sum(-1, keepdim=True) + 0.1)
    torch.testing.assert_close(L2Normalization(eps=0.1)(x), x / root)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalized", [(8,), (3, 8)])
def test_saved_layouts(
    normalized: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(5, 3, 8, device=device).to(dtype)
    rows = x.shape[: -len(normalized)]
    wide = x.double()
    dims = tuple(range(-len(normalized), 0))
    variance, mean = torch.var_mean(wide, dims, correction=0)
    expected = {
        LayerNorm: (x, mean, torch.rsqrt(variance + 1e-5)),
        RMSNorm: (x, torch.rsqrt(wide.square().mean(dims) + 1e-5)),
    }
    if len(normalized) == 1:
        expected[L2Normalization] = (x, torch.rsqrt(wide.square().sum(-1) + 1e-6))
    for cls, tensors in expected.items():
        op = cls() if cls is L2Normalization else cls(normalized).to(device=device, dtype=dtype)
        ctx = OperationContext()
        op.op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
        assert ctx.to_save is not None
        saved, *statistics = ctx.to_save
        assert saved is x
        for got, want in zip(statistics, tensors[1:]):
            assert got is not None
            assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert got.shape == rows
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", AFFINE)
def test_backward_takes_what_a_fusion_saved_as_rows(cls: Any) -> None:
    op = make(cls, (3, 8))
    x, dy = torch.randn(2, 5, 2, 3, 8)
    ctx = OperationContext()
    ctx.needs = GradNeeds(True, tuple(True for _ in op.parameters()), ())
    op.op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    assert ctx.to_save is not None
    ctx.parameters = tuple(p.detach() for p in op.parameters())
    results = []
    rows = [t.reshape(10) for t in ctx.to_save[1:] if t is not None]
    for saved in (ctx.to_save, (x.view(10, 24), *rows)):
        ctx.saved_tensors = saved
        dx, grads = op.op_backward(ctx, dy)
        results.append((dx, *grads))
    assert results[0][0].shape == x.shape
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [LayerNorm(8), RMSNorm(8), L2Normalization()])
def test_rows_of_zeros_and_of_tiny_and_large_numbers(
    op: Any, dtype: torch.dtype, device: torch.device
) -> None:
    op = copy.deepcopy(op).to(device=device, dtype=dtype)
    row = torch.randn(8, device=device)
    x = torch.stack((0 * row, 1e-6 * row, 1e4 * row)).to(dtype).requires_grad_()
    y = op(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    x64 = x.detach().double().requires_grad_()
    expected = copy.deepcopy(op).double().reference(x64)
    (dx64,) = torch.autograd.grad(expected, x64, torch.ones_like(expected))
    rtol = 4 * torch.finfo(dtype).eps
    for got, want in ((y.detach(), expected.detach()), (dx, dx64)):
        for one, other in zip(got.double(), want):
            atol = rtol * float(other.abs().max()) + 1e-6
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", AFFINE)
def test_as_accurate_as_torch(cls: Any, dtype: torch.dtype, device: torch.device) -> None:
    function = F.layer_norm if cls is LayerNorm else F.rms_norm
    op = make(cls, 96).to(device=device, dtype=dtype)
    x, dy = torch.randn(2, 1537, 96, device=device).to(dtype)

    parameters = dict(op.named_parameters())

    def ours(x: Tensor, *values: Tensor) -> Any:
        return functional_call(op, dict(zip(parameters, values)), (x,))

    def plain(x: Tensor, *values: Tensor) -> Tensor:
        return function(x, (96,), *values, eps=1e-5)

    def run(f: Any, like: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(like).requires_grad_() for t in (x, *parameters.values())]
        y = f(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(like))]

    for got, theirs, truth in zip(run(ours, dtype), run(plain, dtype), run(plain, torch.float64)):
        error, allowed = (got - truth).abs().max(), 2 * (theirs - truth).abs().max()
        if INTERPRETED and got.dtype == torch.bfloat16:  # Triton's interpreter does not round it
            allowed += torch.finfo(got.dtype).eps * truth.abs().max()
        assert error <= allowed, (error, allowed)


def test_layer_norm_keeps_its_accuracy_far_from_zero(device: torch.device) -> None:
    x = 300 + torch.randn(16, 64, device=device)
    op = LayerNorm(64).to(device)
    expected = F.layer_norm(x.double(), (64,))
    plain = (F.layer_norm(x, (64,)) - expected).abs().max()
    assert (op(x) - expected).abs().max() <= 2 * plain + 1e-6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
)
def test_layer_norm_computes_only_what_is_read(needs: tuple[bool, ...], bias: bool) -> None:
    op = make(LayerNorm, 8)
    if not bias:
        op.bias = None
    grads = _backward(op, torch.randn(5, 8), needs[0], needs[1 : 3 if bias else 2])
    assert [g is not None for g in grads] == list(needs[: 3 if bias else 2])


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True), (False, False)])
def test_rms_norm_computes_only_what_is_read(needs: tuple[bool, bool]) -> None:
    grads = _backward(make(RMSNorm, 8), torch.randn(5, 8), needs[0], needs[1:])
    assert [g is not None for g in grads] == list(needs)


def _backward(
    op: Any, x: Tensor, needs_input: bool, needs_parameters: tuple[bool, ...]
) -> list[Tensor | None]:
    ctx = OperationContext()
    ctx.needs = GradNeeds(needs_input, needs_parameters, ())
    with torch.no_grad():
        y = op.op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
        ctx.saved_tensors, ctx.parameters = ctx.to_save, tuple(op.parameters())
        dx, grads = op.op_backward(ctx, torch.ones_like(y))
    return [dx, *grads]


def test_layer_norm_without_bias(device: torch.device) -> None:
    op = make(LayerNorm, 8).to(device)
    op.bias = None
    check_op(op, torch.randn(5, 8, device=device), dtypes=DTYPES, zero_rows=True)
    x = torch.randn(5, 8, device=device)
    torch.testing.assert_close(op(x), F.layer_norm(x, (8,), op.weight))
    op.reset_parameters()
    assert list(op.state_dict()) == ["weight"]


@pytest.mark.parametrize("cls", AFFINE)
def test_backward_uses_the_weight_of_its_forward(cls: Any) -> None:
    x = torch.randn(5, 8, requires_grad=True)
    op = make(cls, 8)
    dy = torch.randn(5, 8)
    (expected,) = torch.autograd.grad(op(x), x, dy)
    y = op(x)
    op.weight = nn.Parameter(torch.full((8,), 100.0))
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], expected)


@pytest.mark.parametrize("cls", AFFINE)
def test_start(cls: Any) -> None:
    op = cls(6)
    assert op.weight.tolist() == [1] * 6
    centred = cls(6, zero_centered_gamma=True)
    assert centred.weight.tolist() == [0] * 6
    x = torch.randn(3, 6)
    torch.testing.assert_close(op(x), centred(x))
    assert list(op.state_dict()) == [name for name, _ in op.named_parameters()]


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("cls", AFFINE)
def test_materialised_from_the_meta_device(cls: Any, centred: bool) -> None:
    op = cls((2, 3), device="meta", zero_centered_gamma=centred)
    op.to_empty(device="cpu")
    op.reset_parameters()
    check_op(op, torch.randn(4, 2, 3))


@pytest.mark.parametrize("cls", AFFINE)
def test_device_and_dtype(cls: Any) -> None:
    op = cls(4, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in op.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("op", [make(LayerNorm, 8), make(RMSNorm, 8), L2Normalization()])
def test_copies_compute_the_same(op: Any) -> None:
    x = torch.randn(5, 8)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        torch.testing.assert_close(twin(x), op(x), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
@pytest.mark.parametrize("op", [make(LayerNorm, 8), make(RMSNorm, 8), L2Normalization()])
def test_compiles_without_a_graph_break(op: Any) -> None:
    torch.compiler.reset()
    model = Sequential(copy.deepcopy(op))
    x = torch.randn(8, 6).t().requires_grad_()
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    dy = torch.randn_like(y)
    inputs = (x, *model.parameters())
    got, expected = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(model(x), inputs, dy)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other)


def test_arguments_show() -> None:
    assert repr(LayerNorm(4)) == "LayerNorm((4,), eps=1e-05)"
    centred = RMSNorm((2, 4), eps=0.5, zero_centered_gamma=True)
    assert repr(centred) == "RMSNorm((2, 4), eps=0.5, zero_centered_gamma=True)"
    assert repr(L2Normalization()) == "L2Normalization(eps=1e-06)"


@pytest.mark.parametrize("shape", [(), (0,), (4, -1), 0])
@pytest.mark.parametrize("cls", AFFINE)
def test_normalized_shape_must_be_positive(cls: Any, shape: Any) -> None:
    text = rf"one or more positive sizes \({cls.__name__}\)\. Received: \("
    with pytest.raises(ArgumentError, match=text):
        cls(shape)


@pytest.mark.parametrize("shape", [(3, 5), (4,), (), (3, 4, 2)])
@pytest.mark.parametrize("cls", AFFINE)
def test_input_must_end_in_normalized_shape(cls: Any, shape: tuple[int, ...]) -> None:
    text = re.escape(f"({cls.__name__}((3, 4), eps=1e-05)). Received: shape {shape}.")
    with pytest.raises(InputError, match=text):
        cls((3, 4))(torch.ones(shape))


def test_l2_input_needs_a_dimension() -> None:
    with pytest.raises(InputError, match=r"\(L2Normalization\)\. Received: a tensor of shape \(\)"):
        L2Normalization()(torch.ones(()))


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
@pytest.mark.parametrize("op", [LayerNorm(4), RMSNorm(4), L2Normalization()])
def test_inputs_of_other_dtypes_are_refused(op: Any, dtype: torch.dtype) -> None:
    x = torch.ones(3, 4).to(dtype)
    text = rf"fp32 or fp64 \({type(op).__name__}\)\. Received: a tensor of {dtype}\. Convert"
    with pytest.raises(InputError, match=text):
        op(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match=text):
        op(x)


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
@pytest.mark.parametrize("cls", AFFINE)
def test_parameters_of_other_dtypes_are_refused(cls: Any, dtype: torch.dtype) -> None:
    text = rf"Parameters must be fp16.*\({cls.__name__}\)\. Received: dtype={dtype}"
    with pytest.raises(ArgumentError, match=text):
        cls(4, dtype=dtype)


@pytest.mark.parametrize("cls", [*AFFINE, L2Normalization])
def test_eps_must_be_finite_and_not_negative(cls: Any) -> None:
    shape = () if cls is L2Normalization else (4,)
    for eps in (-1, -1e-9, float("inf"), float("nan")):
        text = rf"finite and not negative \({cls.__name__}\)\. Received: eps={eps}"
        with pytest.raises(ArgumentError, match=text):
            cls(*shape, eps=eps)
    for other in (None, "1e-5"):
        text = rf"eps must be a Python number \({cls.__name__}\)\. Received: eps={other!r}"
        with pytest.raises(ArgumentTypeError, match=text):
            cls(*shape, eps=other)
    assert cls(*shape, eps=0).eps == 0


@pytest.mark.parametrize("margin", [8, {"forward": 0, "backward": 2}])
@pytest.mark.parametrize("cls", AFFINE)
def test_sm_margin_is_not_supported(cls: Any, margin: Any) -> None:
    with pytest.raises(NotSupportedError, match=rf"leave multiprocessors free \({cls.__name__}\)"):
        cls(4, sm_margin=margin)


@pytest.mark.parametrize("cls", AFFINE)
def test_sm_margin_of_zero_is_accepted(cls: Any) -> None:
    cls(4, sm_margin=0)
    cls(4, sm_margin={"forward": 0, "backward": 0, "inference": 0})


@pytest.mark.parametrize("name", ["seq_length", "micro_batch_size"])
def test_l2_warmup_is_not_supported(name: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"\(L2Normalization\).*{name}=2"):
        L2Normalization(**{name: 2})


@pytest.mark.parametrize("op", [LayerNorm(4), RMSNorm(4), L2Normalization()])
def test_keywords_are_refused(op: Any) -> None:
    with pytest.raises(OpKwargsError, match="alpha"):
        Sequential(op)(torch.ones(2, 4), op_kwargs={0: {"alpha": 2}})

"""Element-wise chains in sequences, and with the norm of what they make in the same kernel."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    Dropout,
    LayerNorm,
    MakeExtraOutput,
    RMSNorm,
    Sequential,
    SiLU,
)
from opfuser.core.fusion import Optional
from opfuser.fused import PointwiseChain, PointwiseNorm, norm_linear, pointwise_norm
from opfuser.fused.norm_linear import NormLinear
from opfuser.kernels.launch import recorded
from opfuser.testing import check_fusion, check_op
from tests.basic.values import saved_by
from tests.kernels.chains import example, results

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS: dict[str, Any] = {"rms": RMSNorm, "layer": LayerNorm}


def same(got: list[Tensor], want: list[Tensor], **tolerance: float) -> bool:
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    return True


def block(kind: str, device: torch.device) -> tuple[Sequential, list[Tensor]]:
    """A chain and a norm, the sum before which is an output too, and the linear behind them."""
    rest = MakeExtraOutput(), NORMS[kind](6), BasicLinear(6, 6)
    return example("end of a feed-forward", device, *rest)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("bias and activation", FP16, (2, 3, 6)),
        ("end of a feed-forward", BF16, (5, 6)),
        ("everything", FP16, (5, 6)),
        ("sums before functions", BF16, (6,)),
        ("functions", BF16, (5, 6)),
    ],
    ids=str,
)
def test_a_chain_against_separate_operations(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    seq, tensors = example(name, device, shape=shape)
    check_fusion("pointwise_chain", list(seq), *tensors, dtypes=[dtype])
    transposed = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in tensors]
    assert Sequential(PointwiseChain(list(seq)))(*transposed).is_contiguous()


@pytest.mark.parametrize(
    ("name", "kind", "tapped", "dtype", "shape"),
    [
        ("end of a feed-forward", "layer", False, BF16, (2, 3, 6)),
        ("bias and sum", "rms", True, FP16, (6,)),
        ("everything", "layer", True, FP16, (5, 6)),
        ("sums before functions", "rms", False, FP32, (5, 6)),
        ("dropout alone", "rms", True, BF16, (5, 6)),
    ],
    ids=str,
)
def test_a_chain_and_a_norm_against_separate_operations(
    name: str,
    kind: str,
    tapped: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    tap = [MakeExtraOutput()] * tapped
    seq, tensors = example(name, device, *tap, NORMS[kind](6), shape=shape)
    check_fusion("pointwise_norm", list(seq), *tensors, dtypes=[dtype])


@pytest.mark.parametrize(
    ("name", "fusion", "dtype"),
    [
        ("everything", "pointwise_chain", FP32),
        ("sums before functions", "pointwise_norm", FP32),
        ("end of a feed-forward", "pointwise_norm", BF16),
    ],
    ids=str,
)
def test_autocast(name: str, fusion: str, dtype: torch.dtype, device: torch.device) -> None:
    """The norm casts to the lower dtype, but where the chain already has: two kernels or one."""
    rest = [MakeExtraOutput(), RMSNorm(6)] if fusion == "pointwise_norm" else []
    seq, tensors = example(name, device, *rest)
    with torch.autocast(device.type, BF16):
        # The reference runs in bf16 throughout.
        tensors = [t.to(dtype) for t in tensors]
        check_fusion(fusion, list(seq), *tensors, floor=2**-6)
        dtypes = [t.dtype for t in results(seq, tensors)]
        with opfuser.disable("*"):
            assert dtypes == [t.dtype for t in results(seq, tensors)]


# With the chain as a part of the pattern, so that one fusion is all that has to be switched on.
WITH_LINEAR = replace(
    norm_linear.FUSION,
    name="chain_norm_linear",
    pattern=(*pointwise_norm.FUSION.pattern, BasicLinear, Optional(Bias)),
    refuses=None,
    build=lambda before, make_extra, norm, linear, bias: NormLinear(
        norm=PointwiseNorm(before=before, norm=norm, make_extra=make_extra),
        linear=linear,
        bias=bias,
    ),
)


@pytest.mark.parametrize(
    ("name", "kind", "tapped", "dtype"),
    [
        ("end of a feed-forward", "layer", True, BF16),
        ("one function", "rms", False, FP32),
    ],
    ids=str,
)
def test_with_the_linear_operation_behind_it(
    name: str, kind: str, tapped: bool, dtype: torch.dtype, device: torch.device
) -> None:
    rest: list[nn.Module] = [NORMS[kind](6), BasicLinear(6, 4)]
    rest = [MakeExtraOutput(), *rest, Bias(4)] if tapped else rest
    seq, tensors = example(name, device, *rest)
    check_fusion(WITH_LINEAR, list(seq), *tensors, dtypes=[dtype])


def test_a_norm_over_several_dimensions(device: torch.device) -> None:
    """In no plan: it is a kernel of its own behind that of the chain."""
    fusion = replace(pointwise_norm.FUSION, name="several_dimensions", refuses=None)
    norm = LayerNorm((3, 6))
    seq, tensors = example("sums before functions", device, norm, shape=(5, 3, 6))
    check_fusion(fusion, list(seq), *tensors, dtypes=[FP32, BF16])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_parameters_and_extra_inputs_of_another_dtype(
    dtype: torch.dtype, device: torch.device
) -> None:
    seq, (x, z) = example("everything", device)
    got = results(seq, [x.to(dtype), z])
    exact = results(seq.double(), [x.to(dtype).double(), z.double()])
    assert same([t.double() for t in got], exact, rtol=2e-2, atol=2e-2)
    assert [t.dtype for t in got] == [FP32, dtype, *[FP32] * 3]


def test_a_chain_is_one_launch_forward_and_one_backward(device: torch.device) -> None:
    seq, tensors = example("everything", device, shape=(300, 6))
    with recorded() as forward:
        y = seq(*[t.requires_grad_() for t in tensors])
    with recorded() as backward:
        y.sum().backward()
    names = [noted.launch.name for noted in (*forward, *backward)]
    # Partial sums of the two biases are added up.
    chain = ["pointwise:chain_forward", "pointwise:chain_backward"]
    assert names == [*chain, "column_sums:column_sums"]


@pytest.mark.parametrize("kind", NORMS)
def test_a_chain_and_a_norm_are_one_launch_forward_and_two_backward(
    kind: str, device: torch.device
) -> None:
    seq, _ = block(kind, device)
    x, z = torch.randn(2, 300, 6, device=device).requires_grad_()
    assert seq.plan(x, z).fused("forward") == {"norm_linear": 1}
    with recorded() as forward:
        y, total = seq(x, z)
    with recorded() as backward:
        (y.sum() + total.sum()).backward()
    assert [noted.launch.name for noted in forward] == ["norm:chain_norm_forward"]
    names = [noted.launch.name for noted in backward]
    # The parameters' gradients are added up from partial sums, the norm's together.
    sums = ["column_sums:column_sums"] * 2
    assert sorted(names) == [*sums, "norm:norm_backward", "pointwise:chain_backward"]


@pytest.mark.parametrize(
    ("name", "kind", "linear", "saved"),
    [
        ("end of a feed-forward", "", False, 8),
        ("everything", "", False, 8 + 120 + 24),
        ("sums before functions", "", False, 240),
        ("nothing but sums", "", False, 0),
        ("functions", "", False, 120),
        ("bias and sum", "rms", False, 120 + 20),
        ("bias and sum", "layer", True, 120 + 40),
        ("everything", "rms", True, 8 + 120 + 24 + 120 + 20),
        ("everything", "layer", False, 8 + 120 + 24 + 120 + 40),
        ("sums before functions", "rms", True, 240 + 120 + 20),
    ],
)
def test_what_is_saved(
    name: str, kind: str, linear: bool, saved: int, device: torch.device
) -> None:
    """Seeds of 8 bytes, tensors of 120, and the bias of 24 that the activation's input contains.

    A norm saves the sum before it and statistics of five rows; the linear operation nothing.
    """
    norm = [MakeExtraOutput(), NORMS[kind](6)] if kind else []
    seq, tensors = example(name, device, *norm, *[BasicLinear(6, 4)] * linear)
    known = {p.data_ptr() for p in seq[-2:].parameters()} if kind else set()
    found = saved_by(lambda: seq(*[t.requires_grad_() for t in tensors]))
    bytes_of = {t.data_ptr(): t.nbytes for t in found if t.data_ptr() not in known}
    assert sum(bytes_of.values()) == saved
    with torch.no_grad():
        assert not saved_by(lambda: seq(*tensors))


@pytest.mark.parametrize("with_norm", [False, True])
def test_without_gradients_nothing_is_kept(with_norm: bool, device: torch.device) -> None:
    """Nor is the sum before a norm written."""
    name = "end of a feed-forward" if with_norm else "sums before functions"
    seq, tensors = example(name, device, *[RMSNorm(6)] * with_norm, shape=(300, 6))
    with recorded() as noted, torch.no_grad():
        seq(*tensors)
    (forward,) = noted
    statistics_and_parameters = 300 * 4 + 2 * 6 * 4 + 8 if with_norm else 0
    passes = 3 if with_norm else 4
    assert forward.traffic == passes * tensors[0].numel() * 4 + statistics_and_parameters


def test_masks_are_those_of_separate_operations(device: torch.device) -> None:
    dropouts = Dropout(0.3), ConstantScale(2.0), Dropout(0.6)
    for rest in ((), (MakeExtraOutput(), LayerNorm(33, device=device))):
        seq, x = Sequential(*dropouts, *rest), torch.ones(40, 33, device=device)
        fused = results(seq, [x])
        with opfuser.disable("*"):
            apart = results(seq, [x])
        # The last of the outputs is what the chain made, and the gradient of the input follows.
        n = 1 if rest else 0
        assert 0.1 < (fused[n] != 0).double().mean() < 0.5
        assert torch.equal(fused[n], apart[n])
        assert torch.equal(fused[n + 1] != 0, apart[n + 1] != 0)
        assert same(fused, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_norm", [False, True])
def test_checkpointing_draws_the_masks_again(with_norm: bool, device: torch.device) -> None:
    seq, tensors = block("layer", device) if with_norm else example("everything", device)
    got = results(seq, tensors, lambda *x: checkpoint(seq, *x, use_reentrant=False))
    assert same(got, results(seq, tensors), rtol=0, atol=0)


def test_modes_factors_and_probabilities_are_those_of_the_call(device: torch.device) -> None:
    dropout, factor = Dropout(0.4), ConstantScale(2.0)
    seq = Sequential(factor, dropout, SiLU())
    x = torch.full((30, 33), 40.0, device=device)
    assert set(seq(x).unique().tolist()) == {0.0, torch.tensor(80 / 0.6).item()}
    factor.scale = 3.0
    assert set(seq(x).unique().tolist()) == {0.0, torch.tensor(120 / 0.6).item()}
    dropout.dropout_probability = 0.5
    assert set(seq(x).unique().tolist()) == {0.0, 240.0}
    assert seq.eval()(x).unique().tolist() == [120.0]
    assert set(seq.train()(x).unique().tolist()) == {0.0, 240.0}


def test_what_does_nothing_in_evaluation_comes_back_before_a_norm(device: torch.device) -> None:
    seq = Sequential(Dropout(0.4), AddExtraInput(), RMSNorm(33)).to(device)
    x, z = torch.ones(30, 33, device=device), torch.zeros(30, 33, device=device)
    for training, p in itertools.product((True, False), (0.4, 0.9)):
        seq.train(training)[0].dropout_probability = p
        shares = (seq(x, z) != 0).double().mean().item()
        assert shares == 1 if not training else abs(shares - (1 - p)) < 0.1


@pytest.mark.parametrize(
    ("with_norm", "frozen", "input_grad"),
    [
        (False, ["0.bias"], True),
        (False, ["5.bias"], False),
        (True, ["0.bias"], False),
        (True, ["4.weight", "4.bias"], True),
    ],
)
def test_gradients_that_nobody_needs(
    with_norm: bool, frozen: list[str], input_grad: bool, device: torch.device
) -> None:
    seq, (x, z) = block("layer", device) if with_norm else example("everything", device)
    ys = 2 if with_norm else 1
    want = dict(zip(dict(seq.named_parameters()), results(seq, [x, z])[ys + 2 :], strict=True))
    for name in frozen:
        seq.get_parameter(name).requires_grad_(False)
    torch.manual_seed(3)
    found = seq(x.requires_grad_(input_grad), z)
    outputs = found if with_norm else (found,)
    douts = [f(y.detach()) for f, y in zip((torch.cos, torch.sin), outputs)]
    owed = [(y, dy) for y, dy in zip(outputs, douts) if y.requires_grad]
    torch.autograd.backward(*map(list, zip(*owed)))
    for name, parameter in seq.named_parameters():
        assert (parameter.grad is None) == (name in frozen)
        if name not in frozen:  # with one sum less, a kernel may add in another order
            torch.testing.assert_close(parameter.grad, want[name])
    assert (x.grad is None) != input_grad
    assert z.grad is None


def test_long_rows_take_a_kernel_for_the_chain_and_one_for_the_norm(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq, tensors = block("rms", device)
    want = results(seq, tensors)
    monkeypatch.setattr("opfuser.kernels.pointwise.MAX_CHAIN_ROW", 20)
    with recorded() as noted:
        seq(*tensors)
    names = [launch.launch.name for launch in noted]
    assert names == ["pointwise:chain_forward", "norm:norm_forward"]
    assert same(results(seq, tensors), want)


@pytest.mark.parametrize("with_norm", [False, True])
def test_a_cleared_bias(with_norm: bool, device: torch.device) -> None:
    seq, tensors = block("layer", device) if with_norm else example("everything", device)
    seq[0].bias = None
    plan = seq.plan(tensors[0].requires_grad_(), tensors[1])
    assert plan.fused("forward") == {"norm_linear" if with_norm else "pointwise_chain": 1}
    got = results(seq, tensors)
    with opfuser.disable("*"):
        assert same(got, results(seq, tensors))


def test_backward_twice(device: torch.device) -> None:
    seq, tensors = example("everything", device)
    leaves = [t.requires_grad_() for t in tensors]
    y = seq(*leaves).sum()
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    assert same(list(torch.autograd.grad(y, leaves)), list(first), rtol=0, atol=0)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
# What it imports warns of itself in torch 2.11.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("with_norm", [False, True])
def test_compiled_whole(with_norm: bool, device: torch.device) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    seq, tensors = block("layer", device) if with_norm else example("everything", device)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    assert same(results(seq, tensors, compiled), results(seq, tensors))


MODULE_OF_A_USER = """
import torch
import triton
import triton.language as tl

from opfuser import PointwiseOperation


@triton.jit
def swish(x, P: tl.constexpr):
    s = tl.sigmoid(P[0] * x)
    return x * s, s + P[0] * x * s * (1 - s)


class Swish(PointwiseOperation):
    device_function = {function}

    def value(self, x):
        return x * torch.sigmoid(self.constants[0] * x)
"""


@pytest.mark.parametrize("function", ["swish", "'{module}:swish'"])
def test_operation_of_another_module(
    function: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"swish_of_a_user_{len(function)}"
    source = MODULE_OF_A_USER.format(function=function.format(module=module))
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    swish = importlib.import_module(module).Swish
    x, z = torch.randn(2, 5, 7, device=device)
    check_op(swish(1.5).to(device), x, dtypes=[BF16 if function == "swish" else FP32])
    seq = Sequential(swish(1.5), Dropout(0.2), swish(-0.5), AddExtraInput())
    with recorded() as noted:
        seq(x, z)
    assert len(noted) == 1
    got = results(seq, [x, z])
    with opfuser.disable("*"):
        assert same(got, results(seq, [x, z]))

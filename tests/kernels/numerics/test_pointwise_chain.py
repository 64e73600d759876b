"""Runs of element-wise operations in sequences, with kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import (
    GELU,
    QGELU,
    AddExtraInput,
    Bias,
    ConstantScale,
    Dropout,
    ReLU,
    Sequential,
    Sigmoid,
    SiLU,
    Softplus,
    SReLU,
    Tanh,
)
from opfuser.fused.pointwise_chain import FUSION
from opfuser.kernels.launch import recorded
from opfuser.testing import check_fusion, check_op

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

EXAMPLES: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "bias and activation": (lambda: [Bias(6), GELU()], 0),
    "end of a feed-forward": (lambda: [Bias(6), Dropout(0.3), AddExtraInput()], 1),
    "everything": (
        lambda: [Bias(6), SiLU(), ConstantScale(0.5), Dropout(0.2), AddExtraInput(), Bias(6)],
        1,
    ),
    "sums before functions": (lambda: [AddExtraInput(), ReLU(), AddExtraInput(), Tanh()], 2),
    "nothing but sums": (lambda: [AddExtraInput(), Bias(6), AddExtraInput()], 2),
    "two dropouts": (lambda: [Dropout(0.2), Dropout(0.5)], 0),
    "functions": (lambda: [QGELU(), Softplus(2.0), Sigmoid(), SReLU(), GELU("none")], 0),
}


def sequence(name: str, device: torch.device) -> tuple[Sequential, list[Tensor]]:
    ops, extras = EXAMPLES[name]
    seq = Sequential(*ops()).to(device)
    for parameter in seq.parameters():
        nn.init.normal_(parameter)
    return seq, [torch.randn(5, 6, device=device) for _ in range(1 + extras)]


def gradients(seq: Sequential, tensors: list[Tensor], seed: int = 3) -> list[Tensor]:
    """Output and gradients."""
    torch.manual_seed(seed)
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = seq(*leaves)
    found = torch.autograd.grad(y, [*leaves, *seq.parameters()], torch.cos(y.detach()))
    return [y.detach(), *found]


@pytest.mark.parametrize("name", EXAMPLES)
def test_against_separate_operations(name: str, device: torch.device) -> None:
    seq, tensors = sequence(name, device)
    check_fusion(FUSION.name, list(seq), *tensors, dtypes=DTYPES, zero_rows=True)


@pytest.mark.parametrize("name", ["everything", "sums before functions"])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3, 6)], ids=str)
def test_shapes(name: str, shape: tuple[int, ...], device: torch.device) -> None:
    seq, tensors = sequence(name, device)
    tensors = [torch.randn(shape, device=device) for _ in tensors]
    check_fusion(FUSION.name, list(seq), *tensors)


@pytest.mark.parametrize("name", ["everything", "sums before functions"])
def test_autocast(name: str, device: torch.device) -> None:
    seq, tensors = sequence(name, device)
    with torch.autocast(device.type, torch.bfloat16):
        # The reference runs in bf16 throughout.
        check_fusion(FUSION.name, list(seq), *tensors, floor=2**-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_and_extra_inputs_of_another_dtype(
    dtype: torch.dtype, device: torch.device
) -> None:
    seq, (x, z) = sequence("everything", device)
    got = gradients(seq, [x.to(dtype), z])
    exact = gradients(seq.double(), [x.to(dtype).double(), z.double()])
    for ours, truth in zip(got, exact):
        torch.testing.assert_close(ours.double(), truth, rtol=2e-2, atol=2e-2)
    assert [t.dtype for t in got] == [torch.float32, dtype, *[torch.float32] * 3]


def test_one_launch_forward_and_one_backward(device: torch.device) -> None:
    seq, (x, z) = sequence("everything", device)
    x, z = (torch.randn(300, 6, device=device, requires_grad=True) for _ in range(2))
    with recorded() as forward:
        y = seq(x, z)
    with recorded() as backward:
        y.sum().backward()
    names = [noted.launch.name for noted in (*forward, *backward)]
    chains = [name for name in names if name.startswith("pointwise")]
    assert chains == ["pointwise:chain_forward", "pointwise:chain_backward"]
    # Partial sums of the two biases are added up.
    assert names[2:] == ["column_sums:column_sums"]


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("end of a feed-forward", 8),
        ("everything", 8 + 120 + 24),
        ("sums before functions", 240),
        ("nothing but sums", 0),
        ("functions", 120),
    ],
)
def test_what_is_saved(name: str, saved: int, device: torch.device) -> None:
    """Seeds of 8 bytes, tensors of 120, and the bias of 24 that the activation's input contains."""
    seq, tensors = sequence(name, device)
    bytes_of: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        bytes_of[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        seq(*[t.requires_grad_() for t in tensors])
    assert sum(bytes_of.values()) == saved


def test_without_gradients_nothing_is_kept(device: torch.device) -> None:
    seq, tensors = sequence("sums before functions", device)
    with recorded() as noted, torch.no_grad():
        seq(*tensors)
    (forward,) = noted
    assert forward.traffic == 4 * tensors[0].numel() * 4


def test_masks_are_those_of_separate_operations(device: torch.device) -> None:
    seq = Sequential(Dropout(0.3), ConstantScale(2.0), Dropout(0.6))
    x = torch.ones(40, 33, device=device)
    fused = gradients(seq, [x])
    with opfuser.disable(FUSION.name):
        apart = gradients(seq, [x])
    for ours, theirs in zip(fused, apart):
        assert torch.equal(ours != 0, theirs != 0)
        torch.testing.assert_close(ours, theirs)


def test_checkpointing_draws_the_masks_again(device: torch.device) -> None:
    seq, tensors = sequence("everything", device)
    want = gradients(seq, tensors)
    torch.manual_seed(3)
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = checkpoint(seq, *leaves, use_reentrant=False)
    found = torch.autograd.grad(y, [*leaves, *seq.parameters()], torch.cos(y.detach()))
    for ours, theirs in zip((y.detach(), *found), want):
        assert torch.equal(ours, theirs)


def test_modes_factors_and_probabilities_are_those_of_the_call(device: torch.device) -> None:
    dropout, scale = Dropout(0.4), ConstantScale(2.0)
    seq = Sequential(scale, dropout, SiLU())
    x = torch.full((30, 33), 40.0, device=device)
    assert set(seq(x).unique().tolist()) == {0.0, torch.tensor(80 / 0.6).item()}
    scale.scale = 3.0
    assert set(seq(x).unique().tolist()) == {0.0, torch.tensor(120 / 0.6).item()}
    dropout.dropout_probability = 0.5
    assert set(seq(x).unique().tolist()) == {0.0, 240.0}
    assert seq.eval()(x).unique().tolist() == [120.0]
    assert set(seq.train()(x).unique().tolist()) == {0.0, 240.0}


@pytest.mark.parametrize("frozen", [0, 5])
@pytest.mark.parametrize("input_grad", [True, False])
def test_gradients_that_nobody_needs(frozen: int, input_grad: bool, device: torch.device) -> None:
    seq, (x, z) = sequence("everything", device)
    want = gradients(seq, [x, z])[3:]
    seq[frozen].bias.requires_grad_(False)
    torch.manual_seed(3)
    y = seq(x.requires_grad_(input_grad), z)
    y.backward(torch.cos(y.detach()))
    for at, grad in zip((0, 5), want):
        assert (seq[at].bias.grad is None) == (at == frozen)
        if at != frozen:  # with one sum less, a kernel may add in another order
            torch.testing.assert_close(seq[at].bias.grad, grad)
    assert (x.grad is None) != input_grad
    assert z.grad is None


def test_a_cleared_bias(device: torch.device) -> None:
    seq, tensors = sequence("everything", device)
    seq[0].bias = None
    x, z = tensors
    assert seq.plan(x.requires_grad_(), z).fused("forward") == {FUSION.name: 1}
    got = gradients(seq, tensors)
    with opfuser.disable(FUSION.name):
        want = gradients(seq, tensors)
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours, theirs)


def test_backward_twice(device: torch.device) -> None:
    seq, tensors = sequence("everything", device)
    leaves = [t.requires_grad_() for t in tensors]
    y = seq(*leaves).sum()
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    for ours, theirs in zip(torch.autograd.grad(y, leaves), first):
        assert torch.equal(ours, theirs)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
# What it imports warns of itself in torch 2.11.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ["everything", "sums before functions"])
def test_compiled_whole(name: str, device: torch.device) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    seq, tensors = sequence(name, device)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    leaves = [t.requires_grad_() for t in tensors]
    torch.manual_seed(3)
    y = compiled(*leaves)
    found = torch.autograd.grad(y, [*leaves, *seq.parameters()], torch.cos(y.detach()))
    for ours, theirs in zip((y.detach(), *found), gradients(seq, tensors)):
        torch.testing.assert_close(ours, theirs)


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
    check_op(swish(1.5).to(device), torch.randn(5, 7, device=device), dtypes=DTYPES, zero_rows=True)
    bias = Bias(7, device=device)
    nn.init.normal_(bias.bias)
    ops = [bias, swish(1.5), Dropout(0.2), swish(-0.5), AddExtraInput()]
    x, z = torch.randn(2, 5, 7, device=device)
    check_fusion(FUSION.name, ops, x, z, dtypes=DTYPES)
    with recorded() as noted:
        Sequential(*ops)(x, z)
    assert len(noted) == 1

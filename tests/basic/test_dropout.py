from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from opfuser import Dropout, Identity, OperationContext, Sequential
from opfuser.errors import ArgumentError, ArgumentTypeError, OpKwargsError
from opfuser.kernels.pointwise import draws_seeds
from opfuser.kernels.pointwise_plain import survivors
from opfuser.op import GradNeeds
from opfuser.testing import check_op

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def run(op: Dropout, x: Tensor, dy: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    leaf = x.detach().requires_grad_()
    y = op(leaf)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    return y.detach(), dx


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 33), (1, 7), (0, 5), (2, 3, 101)])
def test_kept_entries_are_scaled_and_the_gradient_has_the_same_mask(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    p = 0.3
    x = torch.rand(shape, dtype=dtype, device=device) + 1
    dy = torch.randn_like(x)
    y, dx = run(Dropout(p), x, dy)
    mask = y != 0
    scale = 1 / (1 - p)
    eps = torch.finfo(dtype).eps
    exact, dexact = x.double() * mask * scale, dy.double() * mask * scale
    torch.testing.assert_close(y.double(), exact, rtol=2 * eps, atol=0)
    torch.testing.assert_close(dx.double(), dexact, rtol=2 * eps, atol=0)
    assert y.dtype == dx.dtype == dtype


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_of_zeros(p: float, device: torch.device) -> None:
    x = torch.ones(100, 1000, device=device)
    y, _ = run(Dropout(p), x, x)
    share = (y == 0).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_numbers_as_torch_from_the_same_seed(dtype: torch.dtype, device: torch.device) -> None:
    """Where kernels run, from the same seed as the reference: kernels draw their own numbers."""
    x, dy = torch.randn(2, 37, 11, dtype=dtype, device=device)
    op = Dropout(0.25)
    y, dx = run(op, x, dy)
    for plain in (op.reference, op.reference if draws_seeds(x) else lambda t: F.dropout(t, 0.25)):
        torch.manual_seed(1)
        leaf = x.detach().requires_grad_()
        expected = plain(leaf)
        (dexpected,) = torch.autograd.grad(expected, leaf, dy)
        # F.dropout divides by 1 - p before it multiplies: one more rounding.
        rtol = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(y, expected.detach(), rtol=rtol, atol=0)
        torch.testing.assert_close(dx, dexpected, rtol=rtol, atol=0)


@pytest.mark.parametrize("case", ["evaluation", "p=0"])
def test_identity(case: str, device: torch.device) -> None:
    op = Dropout(0.4).eval() if case == "evaluation" else Dropout(0.0)
    x, dy = torch.randn(2, 6, 5, device=device)
    y, dx = run(op, x, dy)
    torch.testing.assert_close(y, x, rtol=0, atol=0)
    torch.testing.assert_close(dx, dy, rtol=0, atol=0)


def test_mode_is_that_of_the_call() -> None:
    model = Sequential(Dropout(0.5), Identity())
    x = torch.ones(1000)
    assert (model(x) == 0).any()
    assert not (model.eval()(x) == 0).any()
    assert (model.train()(x) == 0).any()


def test_p_of_one_gives_zeros(device: torch.device) -> None:
    x, dy = torch.randn(2, 6, 5, device=device)
    y, dx = run(Dropout(1.0), x, dy)
    torch.testing.assert_close(y, torch.zeros_like(x), rtol=0, atol=0)
    torch.testing.assert_close(dx, torch.zeros_like(x), rtol=0, atol=0)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_refuses_what_is_no_probability(p: float) -> None:
    with pytest.raises(ArgumentError, match=r"p must be between 0 and 1 \(Dropout\).*p="):
        Dropout(p)


@pytest.mark.parametrize("p", [Fraction(1, 4), np.float32(0.25)], ids=repr)
def test_other_real_numbers_are_floats(p: Any, device: torch.device) -> None:
    op = Dropout(p)
    assert type(op.dropout_probability) is float
    assert repr(op) == "Dropout(p=0.25)"
    x = torch.ones(6, 5, device=device)
    for ours, theirs in zip(run(op, x, x), run(Dropout(0.25), x, x)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("p", "received"), [(torch.tensor(0.5), "a tensor"), ("a", "'a'")])
def test_refuses_what_is_no_number(p: Any, received: str) -> None:
    text = rf"^p must be a real Python number \(Dropout\)\. Received: {received}\.$"
    with pytest.raises(ArgumentTypeError, match=text):
        Dropout(p)


def test_refuses_keywords() -> None:
    with pytest.raises(OpKwargsError, match="seed"):
        Sequential(Dropout(0.5))(torch.ones(2), op_kwargs={0: {"seed": 1}})


def test_non_contiguous_input_and_expanded_gradient(device: torch.device) -> None:
    x = (torch.rand(9, 7, device=device) + 1).t()
    y, dx = run(Dropout(0.5), x, torch.ones((), device=device).expand(7, 9))
    torch.testing.assert_close(y, 2 * x * (y != 0))
    torch.testing.assert_close(dx, 2.0 * (y != 0))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_mask_again(use_reentrant: bool) -> None:
    model = Sequential(Dropout(0.5), Dropout(0.2))
    x = torch.randn(50, 3, requires_grad=True)
    grads = []
    for call in (model, lambda t: checkpoint(model, t, use_reentrant=use_reentrant)):
        torch.manual_seed(5)
        x.grad = None
        call(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def test_a_seed_or_one_byte_per_entry_is_saved(device: torch.device) -> None:
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x = torch.randn(40, 3, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        Dropout(0.5)(x)
        bytes_saved = sum(t.numel() * t.element_size() for t in saved)
        assert bytes_saved == (8 if draws_seeds(x) else x.numel())
        saved.clear()
        Dropout(0.5).eval()(x)
        assert not saved


def test_two_backwards_agree() -> None:
    x = torch.randn(30, requires_grad=True)
    y = Dropout(0.5)(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    second = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_probability_of_the_backward_is_that_of_its_forward() -> None:
    op = Dropout(0.5)
    x = torch.ones(100, requires_grad=True)
    y = op(x)
    op.dropout_probability = 0.2
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, y.detach(), rtol=0, atol=0)


def test_backward_after_a_forward_that_left_no_probability() -> None:
    ctx = OperationContext()
    ctx.needs = GradNeeds(True, (), ())
    ctx.saved_tensors = (torch.tensor([True, False]),)
    dx, _ = Dropout(0.75).op_backward(ctx, torch.ones(2))
    assert dx is not None
    assert dx.tolist() == [4, 0]


def test_backward_makes_the_mask_from_a_seed() -> None:
    ctx = OperationContext()
    ctx.needs = GradNeeds(True, (), ())
    dy, seed = torch.rand(30, 7) + 1, torch.tensor([11])
    ctx.saved_tensors = (seed,)
    dx, _ = Dropout(0.75).op_backward(ctx, dy)
    assert dx is not None
    torch.testing.assert_close(dx, 4 * dy * survivors(dy, seed, 0.75))


@pytest.mark.gpu
def test_each_replay_of_a_graph_draws_a_mask_of_its_own() -> None:
    op, x = Dropout(0.5), torch.ones(64, 64, device="cuda", requires_grad=True)
    dy = torch.ones_like(x)
    torch.autograd.grad(op(x), x, dy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
        (dx,) = torch.autograd.grad(y, x, dy)
    masks = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(y, dx)
        masks.append(y != 0)
    assert 0.4 < (masks[0] == masks[1]).double().mean().item() < 0.6


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_whole() -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    model = Sequential(Dropout(0.5))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = (torch.rand(1000) + 1).requires_grad_()
    y = compiled(x)
    torch.testing.assert_close(y, 2 * x * (y != 0))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, 2.0 * (y != 0))
    assert 300 < (y == 0).sum() < 700


def test_copies() -> None:
    op = Dropout(0.25).eval()
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert repr(twin) == repr(op) == "Dropout(p=0.25)"
        assert not twin.training


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_checked_like_a_users_operation(p: float) -> None:
    check_op(Dropout(p), torch.randn(5, 8), dtypes=DTYPES, zero_rows=True)

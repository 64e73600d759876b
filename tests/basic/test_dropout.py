"""Dropout, and Jitter, which also draws random numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from opfuser import Dropout, Identity, Jitter, OperationContext, Sequential
from opfuser.kernels.pointwise import draws_seeds
from opfuser.kernels.pointwise_plain import survivors
from opfuser.models import MoEConfig, experts
from opfuser.op import GradNeeds
from opfuser.testing import check_op
from tests.basic.values import DTYPES, saved_by


def run(op: Any, x: Tensor, dy: Tensor, seed: int = 1) -> tuple[Tensor, Any]:
    torch.manual_seed(seed)
    leaf = x.detach().requires_grad_()
    y = op(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_entries_are_scaled_and_the_gradient_has_the_same_mask(
    dtype: torch.dtype, device: torch.device
) -> None:
    p = 0.3
    for shape in ((64, 33), (0, 5), (2, 3, 101)):
        x = torch.rand(shape, dtype=dtype, device=device) + 1
        dy = torch.rand_like(x) + 1
        y, dx = run(Dropout(p), x, dy)
        kept = (y != 0).double() / (1 - p)
        for got, full in ((y, x), (dx, dy)):
            assert got.dtype == dtype
            want = full.double() * kept
            torch.testing.assert_close(got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_of_zeros(p: float, device: torch.device) -> None:
    x = torch.ones(100, 1000, device=device)
    y, _ = run(Dropout(p), x, x)
    share = (y == 0).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_numbers_as_torch_from_the_same_seed(dtype: torch.dtype, device: torch.device) -> None:
    """Where kernels run, from the same seed as the reference: kernels draw their own numbers."""
    x, dy = torch.randn(2, 37, 11, dtype=dtype, device=device)
    op = Dropout(0.25)
    # F.dropout divides by 1 - p before it multiplies: one more rounding.
    rtol = 2 * torch.finfo(dtype).eps
    for plain in (op.reference, op.reference if draws_seeds(x) else lambda t: F.dropout(t, 0.25)):
        torch.testing.assert_close(run(op, x, dy), run(plain, x, dy), rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("op", "factor"), [(Dropout(0.4).eval(), 1), (Dropout(0.0), 1), (Dropout(1.0), 0)]
)
def test_nothing_is_random(op: Dropout, factor: int, device: torch.device) -> None:
    x, dy = torch.randn(2, 6, 5, device=device)
    torch.testing.assert_close(run(op, x, dy), (factor * x, factor * dy), rtol=0, atol=0)
    check_op(op, x, dtypes=DTYPES)


def test_mode_is_that_of_the_call() -> None:
    model = Sequential(Dropout(0.5), Identity())
    x = torch.ones(1000)
    assert (model(x) == 0).any()
    assert not (model.eval()(x) == 0).any()
    assert (model.train()(x) == 0).any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_mask_again(use_reentrant: bool) -> None:
    model, x = Sequential(Dropout(0.5), Dropout(0.2)), torch.randn(50, 3)
    again = run(lambda t: checkpoint(model, t, use_reentrant=use_reentrant), x, x)
    torch.testing.assert_close(again, run(model, x, x), rtol=0, atol=0)


def test_a_seed_or_one_byte_per_entry_is_saved(device: torch.device) -> None:
    x = torch.randn(40, 3, device=device, requires_grad=True)
    saved = saved_by(lambda: Dropout(0.5)(x))
    assert sum(t.nbytes for t in saved) == (8 if draws_seeds(x) else x.numel())
    assert not saved_by(lambda: Dropout(0.5).eval()(x))


def backward(dy: Tensor, saved: Tensor) -> Tensor:
    """Of a forward that left no probability."""
    ctx = OperationContext()
    ctx.needs = GradNeeds(True, (), ())
    ctx.saved_tensors = (saved,)
    dx, _ = Dropout(0.75).op_backward(ctx, dy)
    assert dx is not None
    return dx


def test_backward_takes_a_mask_or_a_seed() -> None:
    assert backward(torch.ones(2), torch.tensor([True, False])).tolist() == [4, 0]
    dy, seed = torch.rand(30, 7) + 1, torch.tensor([11])
    torch.testing.assert_close(backward(dy, seed), 4 * dy * survivors(dy, seed, 0.75))


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
def test_compiled_whole() -> None:
    torch.compiler.reset()
    compiled = torch.compile(Sequential(Dropout(0.5)), backend="aot_eager", fullgraph=True)
    x = torch.rand(1000) + 1
    y, dx = run(compiled, x, torch.ones_like(x))
    torch.testing.assert_close(y, 2 * x * (y != 0))
    torch.testing.assert_close(dx, 2.0 * (y != 0))
    assert 300 < (y == 0).sum() < 700


# Noise of a router's input.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradient_have_the_same_jitter(dtype: torch.dtype, device: torch.device) -> None:
    for shape in ((64, 33), (0, 5), (2, 3, 101)):
        x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
        dy = torch.randn_like(x)
        torch.manual_seed(3)
        y = Sequential(Jitter(0.25))(x)
        y.backward(dy)
        torch.manual_seed(3)
        noise = torch.empty(shape, device=device).uniform_(0.75, 1.25).double()
        assert x.grad is not None
        for got, of in ((y, x), (x.grad, dy)):
            assert got.dtype == dtype
            exact, rtol = of.detach().double() * noise, torch.finfo(dtype).eps
            torch.testing.assert_close(got.detach().double(), exact, rtol=rtol, atol=1e-7)
        assert not x.numel() or (noise.min() < 0.76 and noise.max() > 1.24)


def test_jitter_keeps_to_its_reference(device: torch.device) -> None:
    check_op(Jitter(0.1).to(device), torch.randn(5, 6, device=device), dtypes=DTYPES)


def test_jitter_in_evaluation_and_recomputed() -> None:
    op, x = Jitter(0.5), torch.randn(4, 6, requires_grad=True)
    y = checkpoint(op, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx * x, y)
    assert not torch.equal(y, x)
    assert torch.equal(op.eval()(x), x)
    assert torch.equal(Jitter(0.0)(x), x)


def test_the_router_of_a_mixture_alone_has_jitter() -> None:
    config = MoEConfig(8, 6, 4, 4, norm_topk_prob=False, init_std=0.5, dtype=torch.float64)
    plain, noisy = experts(config), experts(replace(config, input_jitter_eps=0.3))
    noisy.load_state_dict(plain.state_dict())
    x = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(noisy.eval()(x), plain(x), rtol=1e-12, atol=1e-12)
    noisy.train()
    torch.manual_seed(3)
    got = noisy(x)
    torch.manual_seed(3)
    jittered = x * torch.empty(x.shape).uniform_(0.7, 1.3)
    weights = (jittered @ plain.get_parameter("router.weight").t()).softmax(-1)
    gate, up = (x @ plain.get_parameter("gate_up.weight").transpose(1, 2)).chunk(2, -1)
    of_experts = (torch.nn.functional.silu(gate) * up) @ plain.get_parameter(
        "down.weight"
    ).transpose(1, 2)
    exact = torch.einsum("te,etd->td", weights, of_experts)
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)

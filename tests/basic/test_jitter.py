"""Noise of a router's input: values, gradients, modes, and in a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from opfuser import Jitter, Sequential
from opfuser.models import MoEConfig, experts
from opfuser.testing import check_op
from tests.basic.values import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradient_have_the_same_noise(dtype: torch.dtype, device: torch.device) -> None:
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


def test_reference_and_protocol(device: torch.device) -> None:
    check_op(Jitter(0.1).to(device), torch.randn(5, 6, device=device), dtypes=DTYPES)


def test_evaluation_and_recomputation() -> None:
    op, x = Jitter(0.5), torch.randn(4, 6, requires_grad=True)
    y = checkpoint(op, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx * x, y)
    assert not torch.equal(y, x)
    assert torch.equal(op.eval()(x), x)
    assert torch.equal(Jitter(0.0)(x), x)


def test_the_router_of_a_mixture_alone_has_it() -> None:
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

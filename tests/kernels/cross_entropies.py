"""What kernels of cross entropy and their plain twins are held to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser.kernels import cross_entropy as kernels
from opfuser.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_gradient,
    cross_entropy_mean,
)
from tests.kernels.accuracy import assert_accurate

IGNORE = -100


class Terms(NamedTuple):
    """The terms of a loss besides the likelihood."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = IGNORE

    @property
    def arguments(self) -> kernels.Terms:
        return kernels.Terms(self.ignore_index, self.smoothing, self.z_loss)


ALL_TERMS = {
    "likelihood": Terms(),
    "smoothed": Terms(0.1),
    "with z-loss": Terms(0.0, 1e-2),
    "all": Terms(0.2, 1e-3),
}


def losses(x: Tensor, targets: Tensor, terms: Terms) -> Tensor:
    """In plain differentiable torch, in the dtype of x."""
    loss = F.cross_entropy(
        x,
        targets.long(),
        reduction="none",
        label_smoothing=terms.smoothing,
        ignore_index=terms.ignore_index,
    )
    z = terms.z_loss * x.logsumexp(1).square()
    return loss + torch.where(targets == terms.ignore_index, 0.0, z)


def some_targets(rows: int, cols: int, device: torch.device) -> Tensor:
    targets = torch.randint(0, cols, (rows,), device=device)
    targets[::3] = IGNORE
    if rows == 1:
        targets[0] = cols - 1
    return targets


def logits(
    rows: int, cols: int, dtype: torch.dtype, device: torch.device, gap: int = 0, offset: int = 0
) -> Tensor:
    """Rows ``gap`` entries apart, of which the first begins at entry ``offset`` of its memory."""
    flat = 3 * torch.randn(offset + rows * (cols + gap), device=device)
    return flat.to(dtype)[offset:].view(rows, cols + gap)[:, :cols]


def assert_as_good_as(ours: Tensor, theirs: Tensor, truth: Tensor, size: float, what: str) -> None:
    """Of logits, probabilities and terms for them: more roundings than one."""
    assert_accurate(what, ours, theirs, truth, units=4, size=size)


def check(x: Tensor, targets: Tensor, terms: Terms = ALL_TERMS["all"], what: str = "") -> None:
    """Holds forward, backward and both at once to float64, errors to those of plain torch."""
    before = x.clone()
    wide = torch.promote_types(x.dtype, torch.float32)
    plain = x.detach().clone().requires_grad_()
    exact = x.detach().double().requires_grad_()
    theirs, truth = losses(plain, targets, terms), losses(exact, targets, terms)

    loss, row_max, sum_exp = cross_entropy_forward(x, targets, terms.arguments)
    assert loss.dtype == row_max.dtype == sum_exp.dtype == wide
    size = max([1.0, *(t.detach().abs().max().item() for t in (truth, exact) if t.numel())])
    assert_as_good_as(loss, theirs.detach(), truth.detach(), size, f"{what}: loss")
    counts = targets != terms.ignore_index
    assert torch.equal(row_max[counts], x.amax(1).to(wide)[counts]), what
    sums = (exact - exact.amax(1, keepdim=True)).exp().sum(1).detach()
    torch.testing.assert_close(sum_exp[counts].double(), sums[counts], rtol=2e-6, atol=0)

    count = counts.sum()
    for dloss, divisor in (
        (torch.rand_like(loss) + 0.5, None),
        (torch.full((), 0.7, dtype=wide, device=x.device), None),
        (torch.full((), 0.7, dtype=wide, device=x.device).expand(loss.shape), count),
    ):
        given = dloss.expand(loss.shape) if divisor is None else dloss.expand(loss.shape) / divisor
        given = torch.where(counts, given, 0.0)  # without any row that counts it is infinite
        (dtruth,) = torch.autograd.grad(truth, exact, given.double(), retain_graph=True)
        (dtheirs,) = torch.autograd.grad(theirs, plain, given.to(theirs.dtype), retain_graph=True)
        dx = cross_entropy_backward(x, targets, row_max, sum_exp, dloss, divisor, terms.arguments)
        assert dx.dtype == x.dtype
        assert dx.is_contiguous()
        size = given.abs().max().item() if given.numel() else 0.0
        assert_as_good_as(dx, dtheirs, dtruth, size, f"{what}: gradient")
        assert not dx[~counts].any(), what
    assert torch.equal(x, before), f"{what}: the logits were written to"

    for divisor in (None, count):
        given = counts.to(wide) if divisor is None else counts.to(wide) / count.clamp_min(1)
        (dtruth,) = torch.autograd.grad(truth, exact, given.double(), retain_graph=True)
        (dtheirs,) = torch.autograd.grad(theirs, plain, given.to(theirs.dtype), retain_graph=True)
        own = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        both, dx = cross_entropy_gradient(own, targets, divisor, terms.arguments)
        assert dx.data_ptr() == own.data_ptr()
        size = given.max().item() if given.numel() else 0.0
        assert_as_good_as(dx, dtheirs, dtruth, size, f"{what}: gradient in place")
        torch.testing.assert_close(both, loss)

    mean, number = cross_entropy_mean(loss, targets, terms.ignore_index)
    assert (number.dtype, number.item()) == (torch.int64, count.item())
    torch.testing.assert_close(mean, loss.sum() / count, equal_nan=True)

"""Cross entropy in plain torch: in fp64, and as traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opfuser.kernels.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_gradient,
    cross_entropy_mean,
    scaled,
)
from opfuser.kernels.cross_entropy_plain import Terms as OfRows
from opfuser.kernels.launch import INTERPRETED, recorded
from tests.kernels.cross_entropies import (
    ALL_TERMS,
    IGNORE,
    Terms,
    check,
    logits,
    losses,
    some_targets,
)

if INTERPRETED:
    pytest.skip("the interpreter's process runs kernels instead", allow_module_level=True)

CPU = torch.device("cpu")
TERMS = OfRows(IGNORE, 0.1, 1e-3)


@pytest.mark.parametrize("name", ALL_TERMS)
def test_in_fp64(name: str) -> None:
    """There is no kernel; what there is for other dtypes, tests/kernels/numerics tests."""
    for rows, cols in ((7, 33), (0, 5), (3, 1)):
        x = logits(rows, cols, torch.float64, CPU)
        check(x, some_targets(rows, cols, CPU), ALL_TERMS[name], f"{rows} x {cols}")


def step(x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    loss, row_max, sum_exp = cross_entropy_forward(x, targets, TERMS)
    mean, count = cross_entropy_mean(loss, targets, IGNORE)
    dx = cross_entropy_backward(x, targets, row_max, sum_exp, mean, count, TERMS)
    both, own = cross_entropy_gradient(x, targets, count, TERMS)
    return mean, dx, both, scaled(own, mean, count, x.dtype, in_place=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
def test_traced_functions_are_plain_torch_and_write_to_nothing() -> None:
    torch.compiler.reset()
    x, targets = logits(6, 9, torch.float32, CPU), some_targets(6, 9, CPU)
    before = x.clone()
    with recorded() as noted:  # as if the CPU had kernels
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(x, targets)
    assert not noted
    assert torch.equal(x, before)
    for a, b in zip(got, step(x.clone(), targets)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_as_traced(smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the scatter, which a compiler does not fuse."""
    x, targets = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 6, -100, 3, 3])
    terms, dloss = OfRows(-100, smoothing, 1e-2), torch.randn(5, dtype=torch.float64)
    _, row_max, sum_exp = cross_entropy_forward(x, targets, terms)
    args = x, targets, row_max, sum_exp, dloss, torch.tensor(4), terms
    wanted = cross_entropy_backward(*args)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    got = cross_entropy_backward(*args)
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)


def test_the_references_agree_with_each_other() -> None:
    """Of the loss that everything is held to, terms by terms."""
    x, targets = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 5, IGNORE, 2])
    terms = Terms(0.3, 0.01)
    lse = x.exp().sum(1).log()
    chosen = x.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1)
    exact = lse - 0.7 * chosen - 0.3 * x.mean(1) + 0.01 * lse**2
    exact[2] = 0
    torch.testing.assert_close(losses(x, targets, terms), exact)

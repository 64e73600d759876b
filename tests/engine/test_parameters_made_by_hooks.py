"""Parameters that a forward pre-hook computes, as torch.nn.utils.prune and its kin do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import opfuser
from opfuser.errors import ArgumentError
from tests.engine.toys import randn

PAIRS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "RMSNorm": (opfuser.RMSNorm, lambda n, dtype: nn.RMSNorm(n, eps=1e-5, dtype=dtype)),
    "Linear": (
        lambda n, dtype: opfuser.Linear(n, n, dtype=dtype),
        lambda n, dtype: nn.Linear(n, n, dtype=dtype),
    ),
    "BasicLinear": (
        lambda n, dtype: opfuser.BasicLinear(n, n, dtype=dtype),
        lambda n, dtype: nn.Linear(n, n, bias=False, dtype=dtype),
    ),
}
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "prune": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch recommends parametrisations instead
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pair", PAIRS)
def test_gradients_are_those_of_torch(pair: str, change: str) -> None:
    ours, theirs = (make(8, dtype=torch.float64) for make in PAIRS[pair])
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        torch.manual_seed(1)
        CHANGES[change](module)
    x = randn(4, 8)
    for _ in range(2):
        opfuser.Sequential(ours, opfuser.GELU())(x).sin().sum().backward()
        nn.GELU("tanh")(theirs(x)).sin().sum().backward()
    expected = dict(theirs.named_parameters())
    assert dict(ours.named_parameters()).keys() == expected.keys()
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.grad, expected[name].grad, rtol=1e-9, atol=1e-12)


def test_a_part_is_not_parametrised_on_its_own() -> None:
    linear = opfuser.Linear(3, 3)
    parametrize.register_parametrization(linear.basic_ops[0], "weight", nn.Identity())
    with pytest.raises(ArgumentError) as error:
        linear(torch.ones(2, 3))
    assert str(error.value) == (
        "The parameters of a compound are parametrised on the compound (Linear). Received: a "
        "parametrisation of one of its basic_ops. Register it on the compound itself."
    )

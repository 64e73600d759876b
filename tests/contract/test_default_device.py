"""torch's default device is that of tensors which users make, and nothing to the library.

Here it is the meta device, which has no values to compute with, and all else is on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.applying import report
from opfuser.models import MoEConfig, moe_block

DIM = 16
STEPS = 4  # the third one is recorded


class Attention(nn.Module):
    """Of two heads, as written by hand, for ``apply``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, DIM // 2)
        q, k, v = (t.transpose(1, 2) for t in heads.unbind(2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def mlp() -> nn.Module:
    return opfuser.Sequential(
        opfuser.RMSNorm(DIM),
        opfuser.Linear(DIM, 2 * DIM, bias=False),
        opfuser.SwiGLU(),
        opfuser.Linear(DIM, DIM),
    )


def in_fp8() -> nn.Module:
    model = mlp()
    model.recipe = opfuser.recipe.DelayedScaling()
    return model


def experts() -> nn.Module:
    config = MoEConfig(DIM, DIM, num_experts=4, top_k=2, capacity_factor=1.5)
    return opfuser.Sequential(moe_block(config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": mlp,
    "FP8": in_fp8,
    "experts": experts,
    "applied": Attention,
}


def trained(model: nn.Module, device: str, *, applied: bool) -> list[Tensor]:
    """Outputs of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    x = torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(2))
    with torch.device(device):
        if applied:
            opfuser.apply(model)
        for _ in range(STEPS):
            y = model(x)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(y.detach())
    if applied:
        assert not report(model).kept
    return [*outputs, *(p.detach() for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:FP8 is emulated")
@pytest.mark.parametrize("name", MODELS)
def test_steps(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    applied = name == "applied"
    expected = trained(copy.deepcopy(model), "cpu", applied=applied)
    found = trained(model, "meta", applied=applied)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)

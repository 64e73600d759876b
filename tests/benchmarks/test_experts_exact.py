"""Experts in float64, against transformers' loop over experts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu import experts
from benchmarks.gpu.experts_exact import in_float64, normed
from benchmarks.gpu.problem import Inputs, Options

SIZE = {"dim": 24, "ffn": 17, "count": 5, "top_k": 3, "tokens": 19}


@pytest.mark.parametrize("block", [False, True], ids=["layer", "block"])
def test_outputs_and_gradients_are_those_of_autograd(block: bool) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = Options(torch.device("cpu"), torch.float64)
    source = experts.Source(SIZE, options, block, led=1)
    if source.norm is not None:
        torch.nn.init.normal_(source.norm, 1.0, 0.1)
    x, dy = torch.randn(2, SIZE["tokens"], SIZE["dim"], dtype=torch.float64)
    found = in_float64(source, SIZE["top_k"], Inputs((x,), (dy,)))
    x = x.clone().requires_grad_()
    y = experts.transformers_block(source, SIZE, "eager")(normed(x, source.norm))
    y = x + y if block else y
    wanted = [y, *torch.autograd.grad(y, [x, *source.parameters()], dy)]
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted):
        # transformers computes probabilities in fp32, and weights' gradients are fp32 here.
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)


def test_an_expert_without_tokens_has_zeros() -> None:
    torch.manual_seed(0)
    source = experts.Source(SIZE, Options(torch.device("cpu"), torch.float32), False, led=3)
    x, dy = torch.randn(2, SIZE["tokens"], SIZE["dim"])
    x[:, 0] = experts.LEADS
    y, _, _, gate_up, down = in_float64(source, SIZE["top_k"], Inputs((x,), (dy,)))
    assert not gate_up[3:].any()
    assert not down[3:].any()
    wide = source.double()
    weights = F.linear(x.double(), wide.router)[:, :3].softmax(-1)
    parts = []
    for e in range(3):
        gate, up = F.linear(x.double(), wide.gate_up[e]).chunk(2, dim=-1)
        parts.append(weights[:, e, None] * F.linear(F.silu(gate) * up, wide.down[e]))
    torch.testing.assert_close(y, sum(parts))

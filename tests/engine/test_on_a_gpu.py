"""What only a GPU shows: compiled models, and capture in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.models import DecoderConfig, decoder_lm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own compiler
    pytest.mark.filterwarnings("ignore:Online softmax:UserWarning"),
    pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning"),
    # make_graphed_callables keeps the last of its warm-up runs, made on another stream.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]


def gradients(call: Any, model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    y = call(*inputs)
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), list(model.parameters()))]


def decoder() -> tuple[nn.Module, list[Tensor]]:
    config = DecoderConfig(1000, 256, 2, 4, num_kv_heads=2, dtype=torch.bfloat16, device="cuda")
    tokens, targets = torch.randint(0, 1000, (2, 2, 128), device="cuda")
    return decoder_lm(config), [tokens, targets]


@pytest.mark.slow
def test_compiled_whole() -> None:
    model, inputs = decoder()
    plan = model.plan(*inputs)
    assert plan.fused("forward").keys() >= {"norm_linear", "activation_linear"}
    want = gradients(model, model, *inputs)
    for how in ("aot_eager", "inductor"):
        torch.compiler.reset()
        compiled = torch.compile(model, backend=how, fullgraph=True)
        for ours, theirs in zip(gradients(compiled, model, *inputs), want):
            assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def block() -> tuple[opfuser.Sequential, Tensor]:
    made = opfuser.Residual(
        opfuser.LayerNorm(256),
        opfuser.Linear(256, 1024),
        opfuser.GELU(),
        opfuser.Linear(1024, 256),
    )
    return made.to("cuda", torch.bfloat16), torch.randn(
        64, 256, device="cuda", dtype=torch.bfloat16
    ).requires_grad_()


def test_graphed_forward_and_backward() -> None:
    model, x = block()
    inputs = [x, *model.parameters()]
    y = model(x)
    want = [y.detach(), *torch.autograd.grad(y.sum(), inputs)]
    del y  # its graph knows the stream that it was made on
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn_like(x).requires_grad_(),))
    for _ in range(2):
        y = graphed(x)
        got = [y.detach().clone(), *torch.autograd.grad(y.sum(), inputs)]
        for ours, theirs in zip(got, want):
            assert torch.equal(ours, theirs)


def test_a_captured_training_step() -> None:
    model, x = block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()
    losses = []
    for _ in range(4):
        graph.replay()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]

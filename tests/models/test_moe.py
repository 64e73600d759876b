"""Mixtures of experts against those of Hugging Face: outputs, every gradient, losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import Sequential
from opfuser.errors import ArgumentError
from opfuser.models import MoEConfig, experts, moe_block
from opfuser.recipe import Float8CurrentScaling
from opfuser.testing import assert_fused
from tests.fused.examples import elements, only, saved_by

SMALL = MoEConfig(dim=16, ffn_dim=12, num_experts=4, top_k=2)
CONFIGS: dict[str, MoEConfig] = {
    "Mixtral": SMALL,
    "Qwen3-MoE": replace(SMALL, num_experts=8, top_k=3),
    "Qwen3-MoE, plain weights": replace(SMALL, norm_topk_prob=False),
    "Qwen2-MoE": replace(SMALL, norm_topk_prob=False, shared_ffn_dim=20, shared_gate=True),
    "DeepSeek-V3": replace(
        SMALL,
        num_experts=8,
        top_k=3,
        score_function="sigmoid",
        scaling_factor=2.5,
        score_correction_bias=True,
        num_groups=4,
        top_k_groups=2,
        shared_ffn_dim=20,
    ),
}


def of_transformers(name: str, config: MoEConfig) -> nn.Module:
    """The block of Hugging Face, with weights large enough that every part matters."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": config.dim,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.ffn_dim,
    }
    family = name.split(",", maxsplit=1)[0]
    if family == "Mixtral":
        module, kind = "mixtral", "Mixtral"
        sizes |= {"num_local_experts": config.num_experts, "intermediate_size": config.ffn_dim}
    elif family == "DeepSeek-V3":
        module, kind = "deepseek_v3", "DeepseekV3"
        sizes |= {
            "n_routed_experts": config.num_experts,
            "n_group": config.num_groups,
            "topk_group": config.top_k_groups,
            # One shared expert of its size, as theirs are multiples of the others.
            "n_shared_experts": 1,
        }
    else:
        module, kind = family.lower().replace("-", "_"), family.replace("-MoE", "Moe")
        sizes |= {"num_experts": config.num_experts, "norm_topk_prob": config.norm_topk_prob}
        sizes |= {"shared_expert_intermediate_size": config.shared_ffn_dim}
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    given = getattr(transformers, f"{kind}Config")(**sizes)
    given._experts_implementation = "eager"
    block = getattr(modeling, f"{kind}MoE" if module == "deepseek_v3" else f"{kind}SparseMoeBlock")
    theirs: nn.Module = block(given)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        nn.init.normal_(tensor)
    return theirs


def weights_of(theirs: Any) -> dict[str, Tensor]:
    """The weights of a block of Hugging Face by our names."""
    out = {
        "router.weight": theirs.gate.weight,
        "gate_up.weight": theirs.experts.gate_up_proj,
        "down.weight": theirs.experts.down_proj,
    }
    shared = getattr(theirs, "shared_expert", getattr(theirs, "shared_experts", None))
    if shared is not None:
        pair = shared.gate_proj.weight, shared.up_proj.weight
        out["shared_gate_up.weight"] = torch.cat(pair)
        out["shared_down.weight"] = shared.down_proj.weight
    if hasattr(theirs, "shared_expert_gate"):
        out["shared_gate.weight"] = theirs.shared_expert_gate.weight
    return out


def grads_of(theirs: Any) -> dict[str, Tensor]:
    """The gradients of those weights."""
    for p in theirs.parameters():
        assert p.grad is not None
        p.data = p.grad
    return weights_of(theirs)


def pair(name: str) -> tuple[Sequential, nn.Module]:
    config = CONFIGS[name]
    if name == "DeepSeek-V3":
        config = replace(config, shared_ffn_dim=config.ffn_dim)
    theirs = of_transformers(name, config)
    ours = experts(replace(config, tokens_per_expert=True))
    state = weights_of(theirs)
    if config.score_correction_bias:
        state["top_k.score_correction_bias"] = theirs.gate.e_score_correction_bias  # type: ignore[union-attr]
    ours.load_state_dict(state)
    return ours, theirs


def force(ours: Sequential, theirs: Any) -> None:
    """Sends all tokens that begin with a one to experts 1, 2, …, and none to expert 0."""
    with torch.no_grad():
        weight = theirs.gate.weight
        weight *= 0.05
        weight[:, 0] = torch.arange(len(weight)).mul(-0.5)
        weight[0, 0] = -30.0
        ours.get_parameter("router.weight").copy_(weight)
        for buffer in (*theirs.buffers(), *ours.buffers()):
            buffer.zero_()


@pytest.mark.parametrize("shape", [(2, 17), (1, 1)], ids=str)
@pytest.mark.parametrize("forced", [False, True], ids=["any", "one has all, another none"])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_are_those_of_transformers(
    name: str, forced: bool, shape: tuple[int, int]
) -> None:
    ours, theirs = pair(name)
    x = torch.randn(*shape, 16)
    if forced:
        force(ours, theirs)
        x[..., 0] = 1.0
    x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
    (got, tokens), want = ours(x), theirs(y)
    assert not forced or (tokens[0] == 0 and tokens[1] == x[..., 0].numel())
    dy = torch.randn_like(want)
    got.backward(dy)
    want.backward(dy)
    assert_close(got, want)
    assert_close(x.grad, y.grad)
    for key, grad in grads_of(theirs).items():
        assert_close(ours.get_parameter(key).grad, grad)


def assert_close(got: Tensor | None, want: Tensor | None) -> None:
    """fp32, relative to the largest element."""
    assert got is not None
    assert want is not None
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def blocks() -> dict[str, Callable[[], Sequential]]:
    """Two blocks in one sequence: their channels do not meet."""
    full = replace(CONFIGS["Qwen2-MoE"], aux_loss=True, z_loss=True, init_std=0.5)
    return {
        "block": lambda: moe_block(full),
        "two": lambda: Sequential(moe_block(full), moe_block(replace(full, z_loss=False))),
    }


@pytest.mark.parametrize("name", blocks())
def test_blocks_are_their_operations_in_float64(name: str) -> None:
    model = blocks()[name]().double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    results = []
    for names in ([handle.name for handle in opfuser.fusions() if handle.enabled], []):
        leaf = x.clone().requires_grad_()
        with only(*names):
            y, *losses = model(leaf)
            loss = y.square().sum() + 0.1 * sum(losses)
        results.append([y, *losses, *torch.autograd.grad(loss, [leaf, *model.parameters()])])
    assert len(results[0]) == len(results[1])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_a_block_adds_to_its_input_what_the_experts_make_of_its_norm() -> None:
    block = moe_block(SMALL).double()
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    mixture = block[2]
    assert isinstance(mixture, Sequential)
    norm = torch.nn.functional.rms_norm(x, (16,), eps=1e-5)
    torch.testing.assert_close(block(x), x + mixture(norm))


def test_what_a_block_saves() -> None:
    """For T tokens and k experts: what comes in, its norm, and k T 2F inputs of activations."""
    config = replace(SMALL, dim=64, ffn_dim=24, num_experts=8, top_k=4)
    block, x, tokens = moe_block(config), torch.randn(50, 64, requires_grad=True), 50
    assert_fused(block, x, joint={"grouped_mlp": 1})
    rows = tokens * config.top_k
    # rstd, logits, indices, row map, sizes, weights of rows
    small = tokens * (1 + config.num_experts) + 3 * rows + config.num_experts
    large = 2 * x.numel() + rows * 2 * config.ffn_dim
    assert elements(saved_by(block, x)) == large + small
    with opfuser.disable("grouped_mlp"):
        apart = elements(saved_by(block, x))
    assert apart == large + small + rows * (config.dim + config.ffn_dim)


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_a_recipe_is_that_of_the_experts_but_not_of_the_router() -> None:
    sizes = {"dim": 128, "ffn_dim": 128, "shared_ffn_dim": 128, "shared_gate": True}
    config = replace(SMALL, **sizes, recipe=Float8CurrentScaling())
    block, x = moe_block(config), torch.randn(6, 128, requires_grad=True)
    for plan in (block.plan(x), experts(config).plan(x)):
        assert [type(plan.basic_ops[i]).__name__ for i in plan.quantized] == [
            "GroupedLinear", "GroupedLinear", "BasicLinear", "BasicLinear",
        ]  # fmt: skip
    exact = moe_block(replace(config, recipe=None))
    exact.load_state_dict(block.state_dict())
    y, want = block(x), exact(x)
    off = (y - want).norm() / (want - x).norm()
    assert 1e-4 < off < 0.1
    y.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def gpu_block() -> tuple[Sequential, Tensor]:
    """A block, and tokens whose experts no rounding changes."""
    config = MoEConfig(
        dim=64, ffn_dim=32, num_experts=8, top_k=2, aux_loss=True, shared_ffn_dim=32,
        shared_gate=True, init_std=0.5, device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip
    block = moe_block(config)
    with torch.no_grad():
        nn.init.eye_(block.get_parameter("2.router.weight"))
    chosen = torch.rand(3, 50, 8, device="cuda").topk(2).indices
    x = torch.randn(3, 50, 64, device="cuda")
    x[..., :8] = 0.1 * x[..., :8].clamp(-1, 1)
    x.scatter_(-1, chosen, torch.tensor([4.0, 2.0], device="cuda").expand(chosen.shape))
    return block, x.bfloat16().requires_grad_()


def step(block: Sequential, x: Tensor) -> list[Tensor]:
    y, aux = block(x)
    loss = y.float().square().sum() + aux
    return [y.detach(), aux.detach(), *torch.autograd.grad(loss, [x, *block.parameters()])]


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu_and_steps_are_reproducible(no_waiting: Any) -> None:
    block, x = gpu_block()
    want = step(block, x)
    with no_waiting():
        got = step(block, x)
    assert all(map(torch.equal, got, want))
    exact, leaf = copy.deepcopy(block).double(), x.detach().double().requires_grad_()
    for a, b in zip(got, step(exact, leaf), strict=True):
        assert (a.double() - b).norm() <= 0.02 * b.norm()


@pytest.mark.gpu
def test_a_step_is_captured_as_a_graph() -> None:
    """With other tokens, which other experts take."""
    block, x = gpu_block()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(block, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(block, x)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        found = [t.clone() for t in captured]
        assert all(map(torch.equal, found, step(block, x)))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"dim": 0}, r"^Sizes must be positive \(MoEConfig\)\. Received: dim=0\."),
        ({"top_k": -1, "ffn_dim": 0}, r"Received: ffn_dim=0, top_k=-1\."),
        (
            {"shared_gate": True},
            r"^shared_ffn_dim must .* without shared_gate \(MoEConfig\)\. .*_gate=True\.",
        ),
        ({"shared_ffn_dim": -1}, r"^shared_ffn_dim must be positive.*shared_ffn_dim=-1"),
    ],
    ids=str,
)
def test_what_a_configuration_cannot_be(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        replace(SMALL, **wrong)

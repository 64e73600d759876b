"""What users of FSDP2 switch on, on two ranks against one: all checks in one start."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from opfuser import Linear
from opfuser.models import DecoderConfig, ImageEncoderConfig, decoder_lm, image_encoder
from opfuser.optim import MasterWeights
from tests.distributed.ranks import DEVICES, Check, Outcomes, assert_passed, outcomes_of
from tests.distributed.sharded import (
    all_ranks,
    assert_same,
    batches,
    gradients_of_one,
    shard,
    twins,
    whole,
)

pytestmark = pytest.mark.distributed

RANKS = 2
CHECKS: dict[str, Check] = {}
CONFIG = DecoderConfig(29, 16, 3, 2, dtype=torch.float64)
make = partial(decoder_lm, CONFIG)


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def pair(how: Any = shard, **arguments: Any) -> tuple[nn.Module, Any]:
    return twins(make, partial(how, **arguments))


def train(one: nn.Module, ours: Any, rank: int, steps: int = 2) -> None:
    """Steps of both, with gradients and weights of the one rank."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, ours)]
    for tokens, targets in batches(RANKS, [2] * steps):
        (losses,) = gradients_of_one(one, [(tokens, targets)])
        loss = ours(tokens[rank], targets[rank])
        assert loss.item() == pytest.approx(losses[rank], rel=1e-11)
        loss.backward()
        assert_same(ours, one)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours, one, grads=False)


def bf16_pair(policy: MixedPrecisionPolicy) -> tuple[nn.Module, nn.Module]:
    """A model in fp32, sharded, and its copy in bf16."""
    config = DecoderConfig(29, 16, 2, 2, tied_head=False)
    one, ours = twins(partial(decoder_lm, config), partial(shard, mp_policy=policy))
    return one.bfloat16(), ours


@check
def micro_batches(rank: int, ranks: int) -> None:
    """Of different sizes; reduced with the last one, while parameters stay gathered or not."""
    for adds in (False, True):
        one, ours = pair()
        for op in ours.modules():
            if isinstance(op, Linear):
                op.accumulate_into_grad = adds
        for keeps in (False, True):
            parts = batches(ranks, (2, 1, 3))
            for m in (one, ours):
                m.zero_grad()
            gradients_of_one(one, parts)
            for n, (tokens, targets) in enumerate(parts):
                last = n == len(parts) - 1
                ours.set_is_last_backward(last)
                ours.set_requires_gradient_sync(last)
                ours.set_reshard_after_backward(last or not keeps)
                ours(tokens[rank], targets[rank]).backward()
                if not last and not keeps:
                    assert all(p.grad is None for p in ours.parameters())
            assert_same(ours, one)


class Recomputed(nn.Module):
    """A layer that ``torch.utils.checkpoint`` recomputes, as a model's own forward calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False, context_fn=keep_products)


def keep_products() -> Any:
    """Of a selective checkpoint: what matrix products return is saved."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def replace_layers(model: Any, inside: Any = None, outside: Any = None) -> None:
    """Shards layers and model; each layer is replaced before it is sharded, or behind that."""
    mesh = all_ranks()
    for n, layer in enumerate(model.layers):
        unit = fully_shard(layer if inside is None else inside(layer), mesh=mesh)
        model.layers[n] = unit if outside is None else outside(unit)
    fully_shard(model, mesh=mesh)


@check
def checkpointed(rank: int, ranks: int) -> None:
    """What is recomputed in backward: a unit, what is in it, or around it; by any of the ways."""
    for impl in CheckpointImpl:
        wrap = partial(checkpoint_wrapper, checkpoint_impl=impl)
        train(*pair(replace_layers, inside=wrap), rank)
        train(*pair(replace_layers, outside=wrap), rank)
    train(*pair(replace_layers, inside=Recomputed), rank)
    one, ours = twins(partial(decoder_lm, replace(CONFIG, recompute="mlp")), shard)
    train(one, ours, rank)
    assert ours.last_plan.fused("forward")["recompute_mlp_where_asked"] == 3


@check
def prefetched(rank: int, ranks: int) -> None:
    """Both orders in which torch may gather units ahead of their calls."""
    one, ours = pair()
    ours.set_modules_to_forward_prefetch(list(ours.layers[:2]))
    for near, behind in zip(ours.layers[:-1], ours.layers[1:]):
        near.set_modules_to_forward_prefetch([behind])
        behind.set_modules_to_backward_prefetch([near])
    train(one, ours, rank)


@check
def gradients_are_clipped(rank: int, ranks: int) -> None:
    one, ours = pair()
    for tokens, targets in batches(ranks):
        gradients_of_one(one, [(tokens, targets)])
        ours(tokens[rank], targets[rank]).backward()
    exact = nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    mine = nn.utils.clip_grad_norm_(ours.parameters(), 0.01)
    torch.testing.assert_close(whole(mine), exact, rtol=1e-11, atol=0)
    assert_same(ours, one)


def bf16_grads(one: nn.Module, parts: Any) -> list[list[Tensor]]:
    """Gradients of each rank in turn, of all parameters."""
    return [
        list(torch.autograd.grad(one(x, t), list(one.parameters())))
        for tokens, targets in parts
        for x, t in zip(tokens, targets)
    ]


@check
def precision(rank: int, ranks: int) -> None:
    """Computed in bf16, bit for bit as a model in bf16; added up and reduced in fp32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    one, ours = bf16_pair(policy)
    parts = batches(ranks, (2, 1))
    for n, (tokens, targets) in enumerate(parts):
        ours.set_requires_gradient_sync(n == 1)
        loss = ours(tokens[rank], targets[rank])
        assert torch.equal(loss, one(tokens[rank], targets[rank]))
        loss.backward()
    exact = [sum(g.float() for g in grads) / ranks for grads in zip(*bf16_grads(one, parts))]
    for p, dw in zip(ours.parameters(), exact):
        assert p.grad.dtype == p.dtype == torch.float32
        torch.testing.assert_close(whole(p.grad), dw, rtol=1e-6, atol=1e-9)


@check
def dtypes_of_inputs_and_outputs(rank: int, ranks: int) -> None:
    config = ImageEncoderConfig(8, 4, 16, 2, 2)
    images = torch.randn(2, config.channels, 8, 8)
    for output, cast in ((torch.float32, True), (None, False)):
        policy = MixedPrecisionPolicy(torch.bfloat16, None, output, cast)
        one, ours = twins(partial(image_encoder, config), partial(shard, mp_policy=policy))
        seen: list[tuple[torch.dtype, torch.dtype]] = []

        def look(m: nn.Module, args: Any, y: Tensor, seen: Any = seen) -> None:
            seen.append((args[0].dtype, y.dtype))

        for layer in ours.layers:
            layer.register_forward_hook(look)
        x = images if cast else images.bfloat16()
        y = ours(x)
        assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
        exact = one.bfloat16()(images.bfloat16())
        assert y.dtype == (output or torch.bfloat16)
        assert torch.equal(y, exact.to(y.dtype))
        y.sum().backward()
        assert {p.grad.dtype for p in ours.parameters()} == {torch.float32}


@check
def start_on_the_meta_device(rank: int, ranks: int) -> None:
    """Values are drawn by each rank for its shards, or come from the first rank."""
    config = replace(CONFIG, tied_head=False)
    torch.manual_seed(1)
    one = decoder_lm(config)
    ours = shard(decoder_lm(replace(config, device="meta"))).to_empty(
        device=torch.get_default_device()
    )
    with warnings.catch_warnings():
        # What DTensor says on a CPU: ranks with one seed draw equal shards.
        warnings.filterwarnings("ignore", "DTensor random operators")
        for module in ours.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for name, p in ours.named_parameters():
        given = p.to_local()
        if given.dim() == 2 and "embedding" not in name:
            bound = p.shape[1] ** -0.5
            assert bound / 2 < given.abs().max() <= bound, name
    full = one.state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(ours, full, options=options)
    assert_same(ours, one, grads=False)
    train(one, ours, rank)


@check
def master_weights(rank: int, ranks: int) -> None:
    """fp32 copies of the shards of parameters in bf16."""
    config = replace(CONFIG, dtype=torch.bfloat16, tied_head=False)
    one, ours = twins(partial(decoder_lm, config), shard)
    optimizers = [MasterWeights(m, torch.optim.AdamW, lr=1e-2) for m in (one, ours)]
    torch.manual_seed(3)
    for _ in range(3):
        for p, q in zip(one.parameters(), ours.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements, src_data_rank=None)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(ours, one, grads=False)


@pytest.fixture(scope="module", params=DEVICES)
def outcomes(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes_of(__name__, RANKS, tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.parametrize("name", CHECKS)
def test_fsdp(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)

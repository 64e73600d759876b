"""Models that are sharded or wrapped, with ``opfuser.apply`` and without, on two ranks."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import opfuser
from opfuser.applying import decisions, report
from opfuser.recipe import DelayedScaling
from tests.distributed.ranks import Checks, Outcomes, assert_passed
from tests.distributed.sharded import all_ranks

pytest.importorskip("transformers")

from tests.applying.models import IDS, NanoGPT, assert_equal_steps, encoder, llama, nano_gpt, paths

pytestmark = pytest.mark.distributed

RANKS = 2
CHECKS = check = Checks()
LAYERS = ["layers.0", "layers.1", "layers.2", "norm"]
Wrap = Callable[[Any], nn.Module]


@contextmanager
def traces() -> Iterator[list[str]]:
    """The classes of modules that are traced meanwhile."""
    traced: list[str] = []

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traced.append(type(module).__name__)
        return original(module, *args, **kwargs)

    original = decisions.trace
    with mock.patch.object(decisions, "trace", counted):
        yield traced


def inputs(model: nn.Module, rank: int) -> Tensor:
    if any(isinstance(m, nn.TransformerEncoder) for m in model.modules()):
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(1, 7, 32, generator=generator, dtype=torch.float64)
    return IDS[rank : rank + 1]


def step(model: nn.Module, rank: int) -> list[Tensor]:
    """Output and gradients of a step of SGD, all shards of them."""
    model.zero_grad()
    out = model(inputs(model, rank))
    y: Tensor = out if isinstance(out, Tensor) else out[0]
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    found = [y.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in grads)]
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1e-3 * p.sign())
    return found


def compare(
    build: Callable[[], Any], wrap: Wrap, rank: int, steps: int = 2, before: bool = False
) -> nn.Module:
    """An applied and wrapped model, after steps that are those of one that is only wrapped.

    After the first of them nothing is traced, and after the first layer of a kind no other one.
    """
    plain, model = wrap(build()), build()
    if before:
        opfuser.apply(model)
        model = wrap(model)
    else:
        model = wrap(model)
        opfuser.apply(model)
    for number in range(steps):
        with traces() as traced:
            got = step(model, rank)
        assert_equal_steps(got, step(plain, rank), rtol=1e-5)
        if number:
            assert traced == []
    return model


def sharded(mesh: Any, **arguments: Any) -> Wrap:
    """Units of layers, and one of all else."""

    def wrap(model: Any) -> nn.Module:
        for layer in model.blocks if isinstance(model, NanoGPT) else model.layers:
            fully_shard(layer, mesh=mesh, **arguments)
        return fully_shard(model, mesh=mesh, **arguments)

    return wrap


@check
def units_of_layers(rank: int, ranks: int) -> None:
    wrap = sharded(all_ranks())
    for before in (False, True):
        with traces() as traced:
            model = compare(llama, wrap, rank, steps=1, before=before)
        assert traced == ["FSDPLlamaDecoderLayer", "LlamaRMSNorm"]
        assert paths(report(model)) == LAYERS


@check
def other_policies(rank: int, ranks: int) -> None:
    mesh = all_ranks()
    for wrap in (
        lambda model: fully_shard(model, mesh=mesh),
        sharded(mesh, reshard_after_forward=False),
    ):
        assert paths(report(compare(llama, wrap, rank))) == LAYERS
    # Parameters in fp32 that are computed with in fp64.
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    model = compare(lambda: llama().float(), sharded(mesh, mp_policy=policy), rank)
    assert paths(report(model)) == LAYERS


@check
def a_tied_head(rank: int, ranks: int) -> None:
    """The units are blocks; embedding and head are one parameter of the root."""
    for before, steps in ((False, 8), (True, 2)):
        model = compare(nano_gpt, sharded(all_ranks()), rank, steps, before)
        assert isinstance(model, NanoGPT)
        assert model.head.weight is model.tokens.weight
        assert paths(report(model)) == ["blocks.0", "blocks.1", "norm"]


@check
def units_inside_of_layers(rank: int, ranks: int) -> None:
    """Attention and feed-forward blocks are units of their own, called by the layer around them."""
    mesh = all_ranks()

    def wrap(model: Any) -> nn.Module:
        for layer in model.layers:
            for part in (layer.self_attn, layer.mlp):
                fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    for before in (False, True):
        found = report(compare(llama, wrap, rank, before=before))
        assert {"layers.1", "layers.1.self_attn", "layers.1.mlp"} <= set(paths(found))
        (layer,) = (entry for entry in found.computed if entry.path == "layers.1")
        assert [path for path, _ in layer.called] == ["self_attn", "mlp"]
        assert "layers.1.input_layernorm" in [entry.path for entry in found.inside]


@check
def from_the_meta_device(rank: int, ranks: int) -> None:
    mesh, plain = all_ranks(), encoder()
    for before in (False, True):
        model = encoder().to("meta")
        if before:
            opfuser.apply(model)
        sharded(mesh)(model).to_empty(device="cpu")
        if not before:
            opfuser.apply(model)
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters()):
                assert isinstance(p, DTensor)
                p.copy_(torch.distributed.tensor.distribute_tensor(q, mesh, p.placements))
        assert_equal_steps(step(model, rank), step(sharded(mesh)(encoder()), rank))
        assert paths(report(model)) == ["layers.0", "layers.1"]


@check
def with_checkpoints(rank: int, ranks: int) -> None:
    mesh = all_ranks()

    def wrap(model: Any) -> nn.Module:
        for number, layer in enumerate(model.layers):
            model.layers[number] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model = compare(llama, wrap, rank)
    assert "layers.0._checkpoint_wrapped_module" in paths(report(model))


@check
def without_gradients_in_between(rank: int, ranks: int) -> None:
    """Evaluation, micro-batches without a reduction, and frozen layers."""
    models = [sharded(all_ranks())(llama()) for _ in range(2)]
    opfuser.apply(models[0])
    ids = IDS[rank : rank + 1]
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            got, want = (m.eval()(ids)[0] for m in models)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        for m in models:
            m.train()
            m.layers[1].requires_grad_(False)
            m.set_requires_gradient_sync(False)
            m(ids)[0].square().sum().backward()
            m.set_requires_gradient_sync(True)
        assert_equal_steps(*(step(m, rank) for m in models), rtol=1e-5)
    assert paths(report(models[0])) == LAYERS


@check
def data_parallel(rank: int, ranks: int) -> None:
    def wrap(**arguments: Any) -> Wrap:
        return lambda model: DistributedDataParallel(model, **arguments)

    names = ["module.blocks.0", "module.blocks.1", "module.norm"]
    for before in (False, True):
        assert paths(report(compare(nano_gpt, wrap(), rank, before=before))) == names
    compare(nano_gpt, wrap(static_graph=True, gradient_as_bucket_view=True), rank)
    # Its forward would be read as one sequence, but for what it tells other ranks.
    model = compare(encoder, wrap(), rank)
    assert paths(report(model)) == ["module"]
    reasons = {entry.path: entry.reason for entry in report(model).kept}
    assert reasons[""] == "runs torch.nn.parallel.distributed, which coordinates devices"


class Part(NanoGPT):
    """Leaves its last block out."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks[0](x)))


@check
def parameters_without_gradients(rank: int, ranks: int) -> None:
    def build() -> nn.Module:
        model = nano_gpt()
        model.__class__ = Part
        return model

    def wrap(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=True)

    compare(build, wrap, rank, before=True)


DELAYED = DelayedScaling(amax_history_len=3)


def quantized_steps(model: nn.Module, steps: range, rank: int, group: Any = None) -> list[Tensor]:
    """Losses, gradients and scales of steps of SGD."""
    seen: list[Tensor] = []
    for number in steps:
        model.zero_grad()
        with opfuser.autocast(recipe=DELAYED, amax_reduction_group=group):
            y = model((IDS[:1] + number + 5 * rank) % 60)
        loss = y.square().mean()
        loss.backward()
        seen.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.1 * p.grad)
                seen.append(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone())
    return [*seen, *scales(model)]


def scales(model: nn.Module) -> list[Tensor]:
    return [t.clone() for name, t in model.state_dict().items() if "quantization" in name]


@check
def quantized(rank: int, ranks: int) -> None:
    """Where all ranks have the same batch, their steps are bit for bit those of one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # emulated, and given to the first rank alone
        quantized_and_wrapped(DistributedDataParallel, rank, before=False)
        quantized_and_wrapped(sharded(all_ranks()), rank, before=True)


def quantized_and_wrapped(wrap: Wrap, rank: int, before: bool) -> None:
    def build(wrap: Wrap = lambda model: model) -> nn.Module:
        model = nano_gpt().float()
        if before:
            opfuser.apply(model)
        model = wrap(model)
        if not before:
            opfuser.apply(model)
        return model

    wanted = quantized_steps(build(), range(7), 0)
    model = build(wrap)
    got = quantized_steps(model, range(4), 0, dist.group.WORLD)
    names = [name.rpartition("blocks")[2] for name in model.state_dict() if "quant" in name]
    places, kept = ("c_attn", "c_proj", "c_fc", "c_out"), ("scale", "amax_history", "amax")
    assert names == [f".{n}.{p}.quantization.{k}" for n in range(2) for p in places for k in kept]
    count = len(names)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = copy.deepcopy(state)
    later = quantized_steps(model, range(4, 7), 0, dist.group.WORLD)
    for ours, theirs in zip([*got[:-count], *later], wanted, strict=True):
        assert torch.equal(ours, theirs)

    resumed = build(wrap)
    resumed(IDS[:1]).sum().backward()
    opfuser.init_recipe_state(resumed, DELAYED)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(resumed, state if rank == 0 else {}, options=options)
    again = quantized_steps(resumed, range(4, 7), 0, dist.group.WORLD)
    for ours, theirs in zip(again, later, strict=True):
        assert torch.equal(ours, theirs)

    for group in (dist.group.WORLD, None):
        for own in (model, resumed):
            quantized_steps(own, range(2), rank, group)
        with opfuser.autocast(recipe=DELAYED, amax_reduction_group=group):
            pass
        found = [t[:2] for name, t in model.state_dict().items() if name.endswith("ion.scale")]
        mine = torch.cat(found)
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        assert torch.equal(*others) == (group is not None)


@check
def accelerate(rank: int, ranks: int) -> None:
    library = pytest.importorskip("accelerate")
    names = "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"
    started = dict(zip(names, map(str, (ranks, ranks, rank, rank))), MASTER_ADDR="localhost")
    with warnings.catch_warnings(), mock.patch.dict(os.environ, started):
        warnings.simplefilter("ignore")
        accelerator = library.Accelerator(cpu=True)
        for before in (False, True):
            model = compare(nano_gpt, accelerator.prepare, rank, before=before)
            assert isinstance(model, DistributedDataParallel)
            assert "module.blocks.0" in paths(report(model))


@pytest.mark.parametrize("name", CHECKS)
def test_applied(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)

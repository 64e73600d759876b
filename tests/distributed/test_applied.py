"""Models to which ``opfuser.apply`` was applied, sharded or wrapped, on two ranks against one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import opfuser
from opfuser.applying import decisions, report
from tests.applying.models import IDS, assert_equal_steps, llama, nano_gpt, paths
from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of
from tests.distributed.sharded import all_ranks

pytestmark = pytest.mark.distributed

RANKS = 2
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@contextmanager
def counted_traces() -> Iterator[list[str]]:
    """The classes of modules that are traced meanwhile."""
    traced: list[str] = []

    def counting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traced.append(type(module).__name__)
        return original(module, *args, **kwargs)

    original = decisions.trace
    with mock.patch.object(decisions, "trace", counting):
        yield traced


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def output_of(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def step(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Output and gradients of a step, all shards of them."""
    model.zero_grad()
    y = output_of(model(ids))
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [y.detach(), *(whole(g).clone() for g in grads)]


def shard(model: Any, how: str, **arguments: Any) -> Any:
    mesh = all_ranks()
    layers = model.blocks if hasattr(model, "blocks") else model.layers
    if how != "root":
        for layer in layers:
            fully_shard(layer, mesh=mesh, **arguments)
    if how == "parts":
        raise NotImplementedError
    fully_shard(model, mesh=mesh, **arguments)
    return model


@check
def fsdp(rank: int, ranks: int) -> None:
    ids = IDS[rank : rank + 1]
    for build, how, order, reshard in itertools.product((llama, nano_gpt), ("layers", "root"), ("before", "after"), (True, False)):
        plain = shard(build(), how, reshard_after_forward=reshard)
        model = build()
        if order == "before":
            opfuser.apply(model)
        shard(model, how, reshard_after_forward=reshard)
        if order == "after":
            opfuser.apply(model)
        counts = []
        for _ in range(4):
            with counted_traces() as traced:
                got = step(model, ids)
            counts.append(traced)
            assert_equal_steps(got, step(plain, ids))
            with torch.no_grad():
                for m in (model, plain):
                    for p in m.parameters():
                        p.mul_(1.01)
        if rank == 0:
            print(build.__name__, how, order, reshard, counts, flush=True)
            print(report(model), flush=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes_of(__name__, RANKS, tmp_path_factory.mktemp("applied"))


@pytest.mark.parametrize("name", CHECKS)
def test_applied(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)

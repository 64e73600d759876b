"""Hazard 25: memory that is kept longer than it is needed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser as of
from tests.contract.tensors import F64, rand


class Storages(TorchDispatchMode):
    """Remembers, weakly, the storage of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.made.append(StorageWeakRef(t.untyped_storage()))
        return out

    def alive(self, *but: Tensor) -> int:
        known = {StorageWeakRef(t.untyped_storage()) for t in but}
        return sum(not ref.expired() and ref not in known for ref in set(self.made))


def block() -> of.Sequential:
    return of.Sequential(
        of.Residual(of.RMSNorm(8, **F64), of.Linear(8, 16, **F64), of.SwiGLU()),
        of.LayerNorm(8, **F64),
        of.Dropout(0.5),
        of.Linear(8, 8, **F64),
        of.GELU(),
    )


@pytest.fixture
def _no_garbage_collection() -> Any:
    """Reference cycles would keep tensors until the collector happens to run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_hazard_25_nothing_stays_after_backward() -> None:
    model, x, dy = block(), rand(5, 8, grad=True), rand(5, 8)
    params = list(model.parameters())
    for _ in range(2):
        with Storages() as storages:
            y = model(x)
        assert storages.alive(x, y, *params) > 0, "something must have been saved for backward"
        y.backward(dy)
        assert storages.alive(x, y, *params) == 0
    assert y.grad_fn is not None, "the output, and with it the graph, is still alive"


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("grad", [False, True])
def test_hazard_25_nothing_stays_when_the_output_is_dropped(grad: bool) -> None:
    model, x = block(), rand(5, 8, grad=grad)
    with Storages() as storages, torch.set_grad_enabled(grad):
        y = model(x)
    if not grad:
        assert storages.alive(x, y, *model.parameters()) == 0
    del y
    assert storages.alive(x, *model.parameters()) == 0


class Watched(of.BasicOperation):
    """Saves a tensor, and notes in backward whether those of later operations are gone."""

    def __init__(self, chain: list[Watched]) -> None:
        super().__init__()
        self.__dict__["chain"] = chain
        chain.append(self)
        self.saved: StorageWeakRef | None = None
        self.gone: list[bool] = []

    def op_forward(self, ctx: of.OperationContext, input_: Tensor, **unused: Any) -> Tensor:
        kept = input_ * 2
        self.saved = StorageWeakRef(kept.untyped_storage())
        ctx.save_for_backward(kept)
        return input_.sin()

    def op_backward(self, ctx: of.OperationContext, grad_output: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        self.gone = [op.saved.expired() for op in self.chain]
        return grad_output * torch.cos(kept / 2), ()


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("retain", [False, True])
def test_hazard_25_memory_is_freed_while_backward_runs(retain: bool) -> None:
    chain: list[Watched] = []
    model = of.Sequential(*(Watched(chain) for _ in range(4)))
    x = rand(5, 8, grad=True)
    model(x).backward(torch.ones(5, 8, dtype=torch.float64), retain_graph=retain)
    for n, op in enumerate(chain):
        freed = [False] * (n + 1) + [not retain] * (3 - n)
        assert op.gone == freed, f"during the backward of op {n}"

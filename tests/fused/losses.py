"""A linear operation with a loss, in as many chunks as a test wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from opfuser import BasicLinear, CrossEntropy, Sequential

# Chunks are of hundreds of rows, and no public name decides it: tests take fewer, by exchanging the
# one function that does, which the tests of its rule call.
from opfuser.fused import _loss_chunks
from tests.contract.tensors import against
from tests.fused.examples import filled

NAME = "linear_cross_entropy"
D, V = 6, 9
split = _loss_chunks.split


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many chunks 33 rows make."""
    if request.param == "one chunk":
        return 1
    chunked(monkeypatch, 12)
    return 3


def chunked(monkeypatch: pytest.MonkeyPatch, rows: int, **others: Any) -> None:
    """Chunks of that many rows, with the ``dtype`` of their sum if it is given."""
    few = lambda *given: split(*given)._replace(rows=rows, **others)  # noqa: E731
    monkeypatch.setattr(_loss_chunks, "split", few)


def head(dtype: torch.dtype = torch.float32, **kwargs: Any) -> Sequential:
    """A linear operation from D to V with random weights, and a loss with these arguments."""
    return Sequential(*filled([BasicLinear(D, V), CrossEntropy(**kwargs)])).to(dtype)


def some_targets(*rows: int, classes: int = V) -> Tensor:
    targets = torch.randint(0, classes, rows)
    if targets.dim():
        targets.view(-1)[::3] = -100
    return targets


def check(seq: Sequential, x: Tensor, targets: Tensor, factor: float = 1.0) -> None:
    """Holds the loss, and the gradients for ``factor``, to the formula; x and weight keep them."""
    assert seq.plan(x, targets).fused("forward") == {NAME: 1}

    def formula(p: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(x, p["0.weight"])
        loss: Tensor = seq[1].reference(logits, targets)
        return loss

    # The gradient that arrives has the dtype of the loss.
    dy = torch.tensor(factor, dtype=torch.promote_types(x.dtype, torch.float32))
    against(seq, formula, x, targets, dys=[dy])

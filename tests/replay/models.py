"""A small model, its steps, and what they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

import opfuser
from opfuser.engine.plan import ReplayRecord

DIM = 16


def block(device: torch.device, dropout: float = 0.0) -> opfuser.Sequential:
    """A residual block with parameters of several shapes."""
    torch.manual_seed(0)
    ops = [
        opfuser.LayerNorm(DIM, device=device),
        opfuser.Linear(DIM, 2 * DIM, device=device),
        opfuser.GELU(),
        opfuser.Linear(2 * DIM, DIM, device=device),
    ]
    return opfuser.Residual(*ops, *([opfuser.Dropout(dropout)] if dropout else []))


def twin(model: opfuser.Sequential) -> opfuser.Sequential:
    """The same model, whose calls are never replayed."""
    other = copy.deepcopy(model)
    other.replay = "off"
    return other


def draw(device: torch.device, rows: int = 6) -> Tensor:
    return torch.randn(rows, DIM, device=device)


def replays(model: opfuser.Sequential) -> tuple[ReplayRecord, ...]:
    """Of each group of the last call."""
    plan = model.last_plan
    assert plan is not None
    return plan.replays


def count(model: opfuser.Sequential) -> int:
    """Calls that were replayed."""
    return sum(record.replayed for record in replays(model))


def code(model: opfuser.Sequential) -> str:
    """Why the last call was not replayed."""
    (record,) = replays(model)
    return "" if record.refusal is None else record.refusal.code


def warm(model: Callable[[Tensor], Tensor], device: torch.device, steps: int = 2) -> None:
    """Makes as many calls with a backward pass as are needed before one is replayed."""
    for _ in range(steps):
        model(draw(device).requires_grad_()).sum().backward()
    if isinstance(model, torch.nn.Module):
        model.zero_grad()


def warm_both(model: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """As :func:`warm`, for inputs that require grad and others, and with recorded backwards."""
    warm(model, device, 3)
    for _ in range(3):
        model(draw(device)).sum().backward()
    if isinstance(model, torch.nn.Module):
        model.zero_grad()


def assert_equal(actual: Tensor | None, expected: Tensor | None) -> None:
    """On a CPU, the same kernels ran. While a GPU captures, cuBLAS may take another one."""
    assert actual is not None
    assert expected is not None
    exact = {} if actual.is_cuda else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(actual, expected, **exact)


def assert_same_grads(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for a, b in zip(model.parameters(), other.parameters()):
        assert_equal(a.grad, b.grad)

"""Modules whose calls are recorded, and what the tests of recorded calls compare."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import opfuser
from opfuser import GELU, Linear, Residual, RMSNorm, Sequential, SwiGLU

D = 16


ENOUGH = 4  # calls after which both passes are recorded


def block() -> Sequential:
    """A block of a decoder."""
    attention = opfuser.DotProductAttention(2, causal=True)
    return Sequential(
        Residual(opfuser.LayerNorm(D), Linear(D, 3 * D), attention, Linear(D, D)),
        Residual(RMSNorm(D), Linear(D, 4 * D), SwiGLU(), Linear(2 * D, D)),
    )


def mlp() -> Sequential:
    """Operations whose forward torch differentiates in forward mode, too."""
    return Sequential(Residual(RMSNorm(D), Linear(D, 2 * D), GELU(), Linear(2 * D, D)), RMSNorm(D))


def dropout() -> Sequential:
    """Draws random numbers."""
    return Sequential(Linear(D, D), opfuser.Dropout(0.5), Linear(D, D))


def image(*, grad: bool = True) -> Tensor:
    return torch.randn(2, 3, D, requires_grad=grad)


@contextmanager
def passes() -> Iterator[list[str]]:
    """The recorded functions that run within it, on this thread."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and " specialized " in code.co_filename and code.co_name != "<module>":
            names.append(code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(before)


def both(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The outputs of a call, and the gradients of inputs and parameters."""
    outputs = module(*inputs)
    rows = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(((n + 1) * y.double().square().sum() for n, y in enumerate(rows)), torch.zeros(()))
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    return [*rows, *torch.autograd.grad(total, wanted)]


def output(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The output of a call without gradients."""
    with torch.no_grad():
        return [module(*inputs)]


def record(module: nn.Module, *inputs: Tensor, call: Callable[..., Any] = both) -> None:
    """Calls a module until its passes are recorded."""
    for _ in range(ENOUGH):
        call(module, *inputs)
    with passes() as names:
        call(module, *inputs)
    assert names, "nothing was recorded"


def twin(make: Callable[[], nn.Module], module: nn.Module) -> nn.Module:
    """Another module with the same values."""
    other = make()
    other.load_state_dict(module.state_dict())
    return other


def bits(t: Tensor) -> Tensor:
    return t.detach().flatten().contiguous().view(torch.uint8)


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Equal bit for bit."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert torch.equal(bits(a), bits(b))

"""Fusions switched between a forward and its recomputation by an activation checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

import opfuser as of
from tests.fused.examples import EXAMPLES, OF_CHAINS, UNQUANTIZED, extras, filled

EACH = pytest.mark.parametrize(
    "fusion", [f for f in UNQUANTIZED if f.name not in OF_CHAINS], ids=lambda f: f.name
)


def only(name: str, on: bool) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(of.disable("*"))
    if on:
        stack.enter_context(of.enable(name))
    return stack


def loss(outputs: Any) -> Tensor:
    ys = outputs if isinstance(outputs, tuple) else (outputs,)
    terms = [(y * torch.linspace(-1, 1, y.numel()).double().view(y.shape)).sum() for y in ys]
    return torch.stack(terms).sum()


def example(name: str) -> tuple[of.Sequential, list[Tensor]]:
    seq = of.Sequential(*filled(EXAMPLES[name][0]())).double()
    inputs = [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)]
    inputs += [t.double() if t.is_floating_point() else t for t in extras(name, 2, 5)]
    return seq, inputs


def grads(y: Tensor, seq: of.Sequential, x: Tensor) -> list[Tensor]:
    x.grad = None
    seq.zero_grad()
    y.backward()
    return [x.grad, *[p.grad for p in seq.parameters()]]


@EACH
@pytest.mark.parametrize("first", [True, False], ids=["off later", "on later"])
def test_switched_between_forward_and_backward(fusion: Any, first: bool) -> None:
    """A reentrant one differentiates what it computes again; another one may have to raise."""
    seq, inputs = example(fusion.name)
    with only(fusion.name, False):
        want = grads(loss(seq(*inputs)), seq, inputs[0])
    with only(fusion.name, first):
        reentrant = loss(checkpoint(seq, *inputs, use_reentrant=True))
        y = loss(checkpoint(seq, *inputs, use_reentrant=False))
    with only(fusion.name, not first):
        torch.testing.assert_close(grads(reentrant, seq, inputs[0]), want)
        if fusion.stage == "joint":  # something else would be saved
            with pytest.raises(CheckpointError):
                y.backward()
        else:
            torch.testing.assert_close(grads(y, seq, inputs[0]), want)


@EACH
def test_unswitched_all_is_as_without_a_checkpoint(fusion: Any) -> None:
    seq, inputs = example(fusion.name)

    def made_anew(*tensors: Tensor) -> Any:
        return of.Sequential(*seq)(*tensors)

    for on in (False, True):
        with only(fusion.name, on):
            want = grads(loss(seq(*inputs)), seq, inputs[0])
            y = loss(checkpoint(made_anew, *inputs, use_reentrant=False))
            torch.testing.assert_close(grads(y, seq, inputs[0]), want)


def test_what_a_fused_loss_saves_is_not_taken_for_something_else() -> None:
    """Its gradients have the shapes of input and weight, which are saved without the fusion."""
    seq, inputs = example("linear_cross_entropy")
    y = checkpoint(seq, *inputs, use_reentrant=False)
    with of.disable("linear_cross_entropy"), pytest.raises(CheckpointError, match="metadata"):
        y.backward()


def test_nothing_is_added_to_what_others_see_saved() -> None:
    seq, inputs = example("activation_linear")
    seen: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        seen.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        seq(*inputs)
    assert seen
    assert all(0 not in shape for shape in seen)

"""Recorded backward passes: which gradients they are for, and what they do with saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import GELU, Linear, Sequential, SwiGLU
from opfuser.engine.recorded.functions import places
from opfuser.engine.recorded.recordable import unrecorded
from opfuser.engine.recorded.specialized import Backward
from tests.engine.recorded_toys import (
    ENOUGH,
    D,
    assert_same,
    block,
    both,
    image,
    output,
    passes,
    record,
    twin,
)


def test_tables_of_other_angles_in_backward() -> None:
    module = opfuser.RotaryEmbedding(2, 8)
    x = torch.randn(2, 5, 3 * D, requires_grad=True)
    bases = [2.0 + n for n in range(8)]
    for base in [*bases, *[bases[-1]] * ENOUGH]:
        module.base = base
        both(module, x)
    y = module(x)
    for base in [100.0 + n for n in range(7)]:
        module.base = base
        output(module, x)
    with unrecorded():
        other = opfuser.RotaryEmbedding(2, 8, base=bases[-1])
        (theirs,) = torch.autograd.grad(other(x).square().sum(), x)
    assert_same([*torch.autograd.grad(y.square().sum(), x)], [theirs])


@pytest.mark.parametrize(
    "dy",
    [
        torch.randn(2, D).expand(3, 2, D).transpose(0, 1),
        torch.randn(D, 3, 2).permute(2, 1, 0),
        torch.randn(2, 3, 2 * D)[..., ::2],
    ],
    ids=["expanded", "transposed", "strided"],
)
def test_gradients_with_other_strides(dy: Tensor) -> None:
    def grads(made: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(made(x), [x, *made.parameters()], dy))

    module, x = block(), image()
    record(module, x, torch.randn(2, 3, D), call=grads)
    y = module(x)
    with passes() as names:
        ours = torch.autograd.grad(y, [x, *module.parameters()], dy)
    assert not names
    with unrecorded():
        assert_same(ours, grads(twin(block, module), x, dy))


def test_gradients_that_are_one() -> None:
    def make() -> Sequential:
        return Sequential(Linear(D, D), opfuser.MakeExtraOutput(), GELU())

    def grads(made: nn.Module, x: Tensor, dy: Tensor, dz: Tensor) -> list[Tensor]:
        y, z = made(x)
        return list(torch.autograd.grad([y, z], [x, *made.parameters()], [dy, dz]))

    x, dy, dz = image(), torch.randn(2, 3, D), torch.randn(2, 3, D)
    for first, second in (((dy, dy), (dy, dz)), ((dy, dz), (dy, dy))):
        module = make()
        record(module, x, *first, call=grads)
        with unrecorded():
            theirs = grads(twin(make, module), x, *second)
        for _ in range(ENOUGH):
            assert_same(grads(module, x, *second), theirs)


def test_gradients_of_some_outputs() -> None:
    def make() -> Sequential:
        return Sequential(Linear(D, D), opfuser.MakeExtraOutput(), GELU())

    def grads_of(made: nn.Module, x: Tensor, *rows: Tensor | None) -> list[Tensor]:
        outputs, given = zip(*[pair for pair in zip(made(x), rows) if pair[1] is not None])
        return list(torch.autograd.grad(outputs, [x, *made.parameters()], given))

    module, x, dy, dz = make(), image(), torch.randn(2, 3, D), torch.randn(2, 3, D)
    record(module, x, dy, dz, call=grads_of)
    strided = torch.randn(3, 2, D).transpose(0, 1)
    for rows in ((dy, None), (None, dz), (dy, strided), (dy, dz)):
        with unrecorded():
            theirs = grads_of(twin(make, module), x, *rows)
        for _ in range(ENOUGH):
            assert_same(grads_of(module, x, *rows), theirs)


def test_saved_tensors_that_a_caller_holds_are_not_written_to() -> None:
    module = Sequential(Linear(D, 2 * D), SwiGLU(), Linear(D, D))
    x = torch.randn(6, D, requires_grad=True)
    record(module, x, call=lambda m, x: m(x).sum().backward())
    for _ in range(ENOUGH):
        y = module(x)
        held = [t for t in y.grad_fn.saved_tensors if t is not None]
        before = [t.clone() for t in held]
        y.sum().backward()
        assert_same(held, before)


def test_a_graph_is_kept_for_another_pass() -> None:
    module, x = block(), image()
    record(module, x)
    y = module(x)
    first = torch.autograd.grad(y.sum(), [x, *module.parameters()], retain_graph=True)
    assert_same(torch.autograd.grad(y.sum(), [x, *module.parameters()], retain_graph=True), first)
    assert_same(torch.autograd.grad(y.sum(), [x, *module.parameters()]), first)


def test_several_gradients_at_once() -> None:
    def make() -> Sequential:
        return Sequential(Linear(D, D), opfuser.MakeExtraOutput(), Linear(D, D))

    module, x = make(), torch.randn(3, D, requires_grad=True)
    record(module, call=lambda m: torch.autograd.grad(m(x)[1].sum(), x))
    several = torch.randn(5, 3, D)
    found = torch.autograd.grad(module(x)[1], x, several, is_grads_batched=True)
    with unrecorded():
        z = twin(make, module)(x)[1]
    torch.testing.assert_close(found, torch.autograd.grad(z, x, several, is_grads_batched=True))


def test_what_operations_have_asked_in_backward_is_asked_again() -> None:
    """As how many ranks there are: a pass of other answers is not the recorded one."""
    answers = ["as recorded"]
    assumed = ((lambda: answers[0], "as recorded"),)
    found = Backward(lambda *_: [], (), (), places([]), (), (), assumed, False)
    assert found.is_for(torch.ones(2), [], [], [])
    answers[0] = "other"
    assert not found.is_for(torch.ones(2), [], [], [])

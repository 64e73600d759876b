"""Replayed calls return what other calls do, and nothing of the caller's is overwritten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opfuser
from tests.replay.models import assert_equal, assert_same_grads, block, count, draw, twin, warm_both

pytestmark = pytest.mark.usefixtures("replaying")


def test_steps(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    for _ in range(5):
        x, dy = draw(device), draw(device)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        ys = [m(own) for m, own in zip((model, other), inputs)]
        assert_equal(*ys)
        for y in ys:
            y.backward(dy)
        assert_same_grads(model, other)
        assert_equal(inputs[0].grad, inputs[1].grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert count(model) == 4
    assert count(other) == 0


def test_what_is_held_keeps_its_value(device: torch.device) -> None:
    model = block(device)
    held: list[tuple[Tensor, Tensor]] = []
    for _ in range(6):
        x = draw(device).requires_grad_()
        y = model(x)
        grads = torch.autograd.grad(y.square().mean(), [x, *model.parameters()])
        for t in (y, y.detach(), y[1:], *grads, *[g.view(-1)[1:] for g in grads]):
            held.append((t, t.detach().clone()))
    assert count(model) > 2
    for t, value in held:
        assert_equal(t, value)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate(set_to_none: bool, device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(7):
        x, dy = draw(device), draw(device)
        for m in (model, other):
            m(x).backward(dy)
        assert_same_grads(model, other)
        if step == 3:
            kept = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
            assert kept
        if step % 3 == 2:
            model.zero_grad(set_to_none)
            other.zero_grad(set_to_none)
    assert count(model) == 6
    del kept


def test_held_gradients_survive_zero_grad(device: torch.device) -> None:
    model = block(device)
    warm_both(model, device)
    held: list[tuple[Tensor, Tensor]] = []
    for _ in range(4):
        model(draw(device)).sum().backward()
        held += [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    for t, value in held:
        assert_equal(t, value)


def test_interleaved(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    warm_both(model, device)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        xs = [draw(device).requires_grad_() for _ in order]
        mine = [model(x) for x in xs]
        theirs = [other(x.detach().requires_grad_()) for x in xs]
        for n in order:
            model.zero_grad()
            other.zero_grad()
            mine[n].sum().backward()
            theirs[n].sum().backward()
            assert_same_grads(model, other)
        for y, expected in zip(mine, theirs):
            assert_equal(y, expected)


def test_a_retained_graph_while_others_run(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    warm_both(model, device)
    x, dy, dz = draw(device), draw(device), draw(device)
    y, z = model(x), other(x)
    for m, result in ((model, y), (other, z)):
        result.backward(dy, retain_graph=True)
        for _ in range(3):
            m(x).sum().backward()
    assert_same_grads(model, other)
    for result in (y, z):
        result.backward(dz)
        with pytest.raises(RuntimeError, match="second time"):
            result.backward(dz)
    assert_same_grads(model, other)


@pytest.mark.parametrize("how", ["forward alone", "exception"])
def test_backwards_that_never_come(how: str, device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    warm_both(model, device)
    before = count(model)
    for _ in range(4):
        y = model(draw(device))
        if how == "exception":
            with pytest.raises(ZeroDivisionError):
                y.sum().backward(torch.tensor(1 // 0))
    x, dy = draw(device), draw(device)
    for m in (model, other):
        m(x).backward(dy)
    assert_same_grads(model, other)
    assert count(model) > before


def test_parameters_changed_before_backward(device: torch.device) -> None:
    model = block(device)
    warm_both(model, device)
    y = model(draw(device))
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_random_numbers(device: torch.device) -> None:
    model = block(device, dropout=0.5)
    other = twin(model)
    warm_both(model, device)
    x = draw(device)
    outputs = []
    for m in (model, model, other):
        torch.manual_seed(3)
        ys = [m(x).detach() for _ in range(3)]
        assert not torch.equal(ys[0], ys[1])
        outputs.append(ys)
    for ys in outputs[1:]:
        for y, expected in zip(ys, outputs[0]):
            assert_equal(y, expected)
    for m in (model, other):
        torch.manual_seed(5)
        m.zero_grad()
        m(x).sum().backward()
    assert_same_grads(model, other)


def test_second_derivatives_raise(device: torch.device) -> None:
    model = block(device)
    warm_both(model, device)
    x = draw(device).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(opfuser.errors.DoubleBackwardError):
        dx.sum().backward()


def test_extra_tensors(device: torch.device) -> None:
    def make() -> opfuser.Sequential:
        torch.manual_seed(1)
        return opfuser.Sequential(
            opfuser.Linear(16, 16, device=device),
            opfuser.MakeExtraOutput(),
            opfuser.AddExtraInput(),
            opfuser.GELU(),
        )

    model, other = make(), twin(make())
    for step in range(6):
        x, extra = draw(device), draw(device)
        results = []
        for m in (model, other):
            own = [t.clone().requires_grad_() for t in (x, extra)]
            y, between = m(*own)
            which = (y, between, y + between)[step % 3]
            which.square().sum().backward()
            results.append([y, between, *[t.grad for t in own]])
        for a, b in zip(*results):
            if a is None or b is None:
                assert a is b
            else:
                assert_equal(a, b)
        assert_same_grads(model, other)
    assert count(model) == 5

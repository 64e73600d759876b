"""What changes between calls is seen: another recording, or a call as usual."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend

import opfuser
from tests.replay.models import (
    DIM,
    assert_equal,
    assert_same_grads,
    block,
    code,
    count,
    draw,
    replays,
    twin,
    warm_both,
)

pytestmark = pytest.mark.usefixtures("replaying")

Model = opfuser.Sequential


def update(model: Model) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)


def load(model: Model, assign: bool = False) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=assign)


def of_weight(change: Callable[[Any], object]) -> Callable[[Model], object]:
    return lambda model: change(model[2].weight)


CHANGES: dict[str, Callable[[Model], object]] = {
    "a parameter": lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach() * 2)),
    "data": of_weight(lambda w: setattr(w, "data", w.detach() * 3)),
    "the layout": of_weight(lambda w: setattr(w, "data", w.detach().t().clone().t())),
    "loaded": load,
    "loaded and assigned": lambda m: load(m, assign=True),
    "updated": update,
    "frozen": of_weight(lambda w: w.requires_grad_(False)),
    "an attribute": lambda m: setattr(m[1], "eps", 0.5),
    "evaluated": lambda m: m.eval(),
    "cast": lambda m: m.double(),
    "an operation": lambda m: m.insert(3, opfuser.ConstantScale(2.0)),
    "a hook": lambda m: m[3].register_forward_hook(lambda module, args, y: y * 2),
    "a hook on a parameter": of_weight(lambda w: w.register_hook(lambda grad: grad * 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_model(change: str, device: torch.device) -> None:
    model = block(device, dropout=0.5)
    other = twin(model)
    warm_both(model, device)
    for m in (model, other):
        CHANGES[change](m)
    x = draw(device).to(model[2].weight.dtype)
    for seed in range(4):
        results = []
        for m in (model, other):
            m.zero_grad()
            torch.manual_seed(seed)
            y = m(x)
            y.square().mean().backward()
            results.append(y)
        assert_equal(*results)
        for a, b in zip(model.parameters(), other.parameters()):
            if b.grad is None:
                assert a.grad is None
            else:
                assert_equal(a.grad, b.grad)
    assert count(model) > 3 or change in ("a hook", "an operation")


def test_shapes_dtypes_and_modes(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    calls = [
        lambda m: m(torch.ones(3, DIM, device=device)),
        lambda m: m(torch.ones(5, DIM, device=device)),
        lambda m: m(torch.ones(2, 3, DIM, device=device)),
        lambda m: m(torch.ones(DIM, 5, device=device).t()),
        lambda m: m(torch.ones(1, DIM, device=device).expand(5, DIM)),
        lambda m: m(torch.ones(5, DIM, device=device, requires_grad=True)),
        lambda m: m(torch.ones(0, DIM, device=device)),
        lambda m: torch.no_grad()(m)(torch.ones(5, DIM, device=device)),
        lambda m: torch.inference_mode()(m)(torch.ones(5, DIM, device=device)),
    ]
    for _ in range(3):
        for call in calls:
            y, expected = call(model), call(other)
            assert y.requires_grad == expected.requires_grad
            assert y.is_inference() == expected.is_inference()
            assert_equal(y.detach(), expected.detach())
    assert count(model) == 2 * (len(calls) - 1), "all but those without rows"


def test_autocast(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    for step in range(6):
        x = draw(device)
        grads = []
        for m in (model, other):
            m.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=step % 2 == 0):
                y = m(x)
                m(x)  # weights that autocast has cast before
            y.float().sum().backward()
            grads.append(y.detach())
            with torch.no_grad():
                for p in m.parameters():
                    p.mul_(1.5)
        assert_equal(*grads)
        assert_same_grads(model, other)
    assert count(model) > 4


def test_fusions_switched(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    x = draw(device)
    for _ in range(3):
        with opfuser.disable("*"):
            assert_equal(model(x).detach(), other(x).detach())
        assert_equal(model(x).detach(), other(x).detach())
    assert count(model) == 4


@contextlib.contextmanager
def matmul_in_tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def with_ranks() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "mode",
    [
        matmul_in_tf32,
        deterministic,
        default_dtype,
        with_ranks,
        lambda: torch.nn.attention.sdpa_kernel(SDPBackend.MATH),
    ],
    ids=["tf32", "deterministic", "default dtype", "ranks", "attention"],
)
def test_modes_that_choose_kernels(mode: Callable[[], Any], device: torch.device) -> None:
    model, x = block(device), draw(device)
    for _ in range(3):
        with mode():
            model(x)
        model(x)
    assert replays(model)[0].instances == 2


class Schedule(opfuser.BasicOperation):
    """Sets a number of another operation, from its fifth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.sets: list[opfuser.ConstantScale] = []

    def op_forward(
        self, ctx: opfuser.OperationContext, input_: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        self.calls += 1
        if self.calls > 4:
            for op in self.sets:
                op.scale = float(self.calls)
        return input_ * 1

    def op_backward(self, ctx: opfuser.OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output, ()


def test_numbers_that_another_operation_sets_in_its_forward(device: torch.device) -> None:
    scale = opfuser.ConstantScale(1.0)
    linear = opfuser.Linear(DIM, DIM, device=device)
    model = opfuser.Sequential(Schedule(), nn.Identity(), linear, scale)
    model[0].sets = [scale]
    replayed = []
    for _ in range(8):
        x = draw(device).requires_grad_()
        y = model(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        expected = nn.functional.linear(x, linear.weight, linear.bias) * scale.scale
        assert_equal(y.detach(), expected.detach())
        assert_equal(dx, torch.autograd.grad(expected.sum(), x)[0])
        plan = model.last_plan
        assert plan is not None
        replayed.append(plan.replays[1].replayed)
    assert scale.scale == 8.0
    assert replayed[3] == replayed[-1] > 0


def test_functional_call(device: torch.device) -> None:
    model = block(device)
    warm_both(model, device)
    x = draw(device)
    expected = {}
    for scale in (1.0, 2.0, 1.0, 3.0, 2.0):
        state = {name: p.detach() * scale for name, p in model.named_parameters()}
        y = torch.func.functional_call(model, state, (x,))
        expected.setdefault(scale, y)
        assert_equal(y, expected[scale])
    assert not torch.equal(expected[1.0], expected[2.0])


def test_parameters_that_move_at_every_call(device: torch.device) -> None:
    model, x = block(device), draw(device)
    held = []
    for _ in range(20):
        model[2].weight.data = model[2].weight.detach().clone()
        held.append(model[2].weight.detach())
        model(x)
    assert count(model) == 0
    assert code(model) == "ADDRESSES_MOVE"


def test_parameters_that_move_now_and_then(device: torch.device) -> None:
    model, x = block(device), draw(device)
    held = []
    for step in range(40):
        if step % 3 == 0:
            model[2].weight.data = model[2].weight.detach().clone()
            held.append(model[2].weight.detach())
        model(x)
    assert count(model) == 26


def test_many_shapes_do_not_displace_a_recording(device: torch.device) -> None:
    model, x = block(device), draw(device)
    for rows in range(1, 200):
        model(draw(device, rows))
    for _ in range(3):
        model(x)
    assert count(model) == 2
    for rows in range(200, 300):
        model(draw(device, rows))
    model(x)
    assert count(model) == 3


def move(p: Any) -> list[torch.Tensor]:
    """Gives a parameter other memory, as FSDP does, which gathers it once more for backward.

    Returns what took the old one.
    """
    storage, value = p.untyped_storage(), p.detach().clone()
    size = storage.nbytes()
    storage.resize_(0)
    taken = [torch.full_like(value, float("nan")) for _ in range(8)]
    storage.resize_(size)
    p.data.copy_(value)
    return taken


def test_memory_moves_between_the_passes(device: torch.device) -> None:
    model = block(device)
    other = twin(model)
    warm_both(model, device)
    x, dy = draw(device), draw(device)
    y = model(x)
    before = [p.data_ptr() for p in model.parameters()]
    taken = [move(p) for p in model.parameters()]
    assert all(p.data_ptr() != old for p, old in zip(model.parameters(), before))
    y.backward(dy)
    del taken
    other(x).backward(dy)
    assert_same_grads(model, other)


def test_memory_of_a_transposed_weight_moves_between_the_passes(device: torch.device) -> None:
    """What backward has saved is a view of the parameter."""
    model = opfuser.Sequential(opfuser.Linear(DIM, DIM, device=device, weight_transposed=True))
    other = twin(model)
    warm_both(model, device)
    x, dy = draw(device).requires_grad_(), draw(device)
    y = model(x)
    before = model[0].weight.data_ptr()
    taken = move(model[0].weight)
    assert model[0].weight.data_ptr() != before
    y.backward(dy)
    del taken
    expected = torch.autograd.grad(other(x), [x, *other.parameters()], dy)
    assert_equal(x.grad, expected[0])
    for p, grad in zip(model.parameters(), expected[1:]):
        assert_equal(p.grad, grad)
    y = model(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert count(model) >= 2


def test_data_of_a_linear_are_exchanged_between_the_passes(device: torch.device) -> None:
    """Backward reads what forward has read, as torch's does."""
    model = opfuser.Sequential(opfuser.Linear(DIM, DIM), opfuser.GELU(), opfuser.Linear(DIM, DIM))
    other = twin(model.to(device))
    warm_both(model, device)
    x, dy = draw(device).requires_grad_(), draw(device)
    y = model(x)
    for p in model.parameters():
        p.data = p.data * 3
    y.backward(dy)
    expected = torch.autograd.grad(other(x), [x, *other.parameters()], dy)
    for ours, theirs in zip([x, *model.parameters()], expected):
        assert_equal(ours.grad, theirs)
    assert count(model) >= 1


def test_copies_have_recordings_of_their_own(device: torch.device) -> None:
    model = block(device)
    warm_both(model, device)
    other = copy.deepcopy(model)
    update(other)
    x = draw(device)
    for _ in range(3):
        assert not torch.equal(model(x), other(x))
    assert count(other) == 2


def test_operations_behind_a_plain_module(device: torch.device) -> None:
    torch.manual_seed(0)
    model = opfuser.Sequential(
        opfuser.Linear(DIM, DIM, device=device),
        opfuser.GELU(),
        nn.Tanh(),
        opfuser.Linear(DIM, DIM, device=device),
    )
    other = twin(model)
    for _ in range(5):
        x = draw(device)
        for m in (model, other):
            m(x).square().sum().backward()
        assert_same_grads(model, other)
    assert [(r.indices, r.replayed) for r in replays(model)] == [((0, 1, 2), 4), ((3, 4), 4)]

"""Numbers that begin at 0, from memory that is filled for many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from opfuser.kernels.launch import recorded
from opfuser.kernels.quantize import amax_of
from opfuser.kernels.zeros import zero_for, zeros_for

X = torch.ones(2, 3, dtype=torch.bfloat16)


@pytest.fixture
def kernels() -> Iterator[None]:
    """As if kernels ran on a CPU."""
    with recorded():
        yield


def one_by_one(count: int) -> list[Tensor]:
    return [zero_for(X) for _ in range(count)]


def some_at_once(count: int) -> list[Tensor]:
    numbers: list[Tensor] = []
    while len(numbers) < count:
        numbers += zeros_for(X, min(7, count - len(numbers)))
    return numbers


TAKEN = pytest.mark.parametrize("taken", [one_by_one, some_at_once])
Taken = Callable[[int], list[Tensor]]


def memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


@TAKEN
@pytest.mark.usefixtures("kernels")
def test_each_is_0_and_nobody_elses(taken: Taken) -> None:
    numbers = taken(300)
    for n, number in enumerate(numbers):
        assert (number.shape, number.dtype, number.item()) == ((1,), torch.float32, 0.0)
        number.fill_(n + 1)
    assert [number.item() for number in numbers] == [float(n + 1) for n in range(300)]
    assert len({memory(number) for number in numbers}) <= 4, "each has a fill of its own"
    assert all(number.data_ptr() % 16 == 0 for number in numbers), "launches tell them apart"


@TAKEN
def test_without_kernels_each_has_its_memory(taken: Taken) -> None:
    first, second = taken(2)
    assert memory(first) != memory(second)
    assert first.untyped_storage().nbytes() == 4


@TAKEN
@pytest.mark.usefixtures("kernels")
def test_a_write_to_one_is_not_one_to_another(taken: Taken) -> None:
    saved, other = taken(2)
    w = torch.ones(1, requires_grad=True)
    y = w * saved
    other.add_(1.0)
    y.backward()
    assert w.grad.item() == 0.0


@TAKEN
@pytest.mark.usefixtures("kernels")
def test_those_of_an_inference_are_no_inference_tensors(taken: Taken) -> None:
    with torch.inference_mode():
        numbers = taken(300)
    assert not any(number.is_inference() for number in numbers)


@pytest.mark.usefixtures("kernels")
def test_those_of_a_mode_stay_there() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
        inside = [type(zero_for(fake)) for _ in range(300)]
    assert Tensor not in inside[-128:]
    assert {type(zero_for(X)) for _ in range(300)} == {Tensor}


@pytest.mark.gpu
def test_a_replay_begins_at_0_again() -> None:
    x = torch.full((1000,), 8.0, device="cuda")
    amax_of(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        amax = amax_of(x)
    for value in (4.0, 2.0):
        x.fill_(value)
        graph.replay()
        assert amax.item() == value


@pytest.mark.gpu
def test_streams_have_their_own() -> None:
    other = torch.cuda.Stream()
    here = zero_for(X.cuda())
    with torch.cuda.stream(other):
        there = zero_for(X.cuda())
    assert memory(here) != memory(there)

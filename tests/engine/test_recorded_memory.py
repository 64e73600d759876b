"""Passes that launch kernels by addresses allocate and make views no more often than they must."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser import torch_internals
from opfuser.engine.recorded.memory import Allocation, Scratch
from opfuser.runtime.recording import seen_whole, watching
from tests.engine.test_recorder import straight

HERE = torch.device("cpu")


class Launch:
    """Stands for a launch that writes sums of its first tensors to the last, all of them fp32.

    Args:
        prepared: whether the pass that is recorded launches by addresses.
    """

    name = "module:summed"
    only_reads: int | None = None

    def __init__(self, *, prepared: bool = True) -> None:
        self.by_addresses = prepared
        self.addresses: list[tuple[int, ...]] = []
        self.before: Callable[[], None] | None = None

    def __call__(self, grid: Any, tensors: Any, ints: Any = (), floats: Any = ()) -> None:
        with torch._C.DisableTorchFunction():
            self.run(1, 1, 1, 0, None, *[t.data_ptr() for t in tensors], *ints)
        if watching.watcher is not None:
            watching.watcher.note_launch(self, grid, tensors, ints, floats)

    def prepared(self, tensors: Any, ints: Any) -> Any:
        return (self.run, self.name, (), False, ()) if self.by_addresses else None

    def run(self, x: int, y: int, z: int, stream: int, function: Any, *args: int) -> None:
        """The last argument is how many elements each tensor has."""
        *addresses, count = args
        if self.before is not None:
            self.before()
        self.addresses.append(tuple(addresses))
        rows = [(ctypes.c_float * count).from_address(address) for address in addresses]
        *given, target = (torch.frombuffer(row, dtype=torch.float32) for row in rows)
        target.copy_(torch.stack(given).sum(0))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current stream, which tests may change; none is captured, nor asked for without a GPU."""
    stream = [0]
    monkeypatch.setattr(torch_internals, "cuda_stream", lambda device: stream[0])
    monkeypatch.setattr(torch_internals, "cuda_captures", lambda: False)
    return stream


def check(function: Any, x: Tensor, y: Tensor) -> str:
    """The text of what was recorded, which does the same for other values."""
    recorded, text = straight(function, x, y)
    for _ in range(3):
        x, y = torch.randn_like(x), torch.randn_like(y)
        ours, theirs = recorded(x, y), function(x, y)
        theirs = theirs if isinstance(theirs, tuple) else (theirs,)
        for a, b in zip(ours, theirs):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
    return text


def test_memory_is_allocated_as_it_is_read() -> None:
    launch = Launch()

    def products(x: Tensor, y: Tensor) -> Tensor:
        made = torch.empty(8, 4)
        launch((1, 1, 1), (x, y, made), (32,))
        return x @ made.t()

    text = check(products, torch.randn(8, 4), torch.randn(8, 4))
    assert "empty_strided((4, 8), (1, 4)" in text
    assert ".t()" not in text
    launch.by_addresses = False  # dtypes are read, too, and are the same
    assert ".t()" not in check(products, torch.randn(8, 4), torch.randn(8, 4))


def test_memory_that_others_read_as_it_is_stays() -> None:
    launch = Launch()

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made, other, third = torch.empty(8, 4), torch.empty(8, 4), torch.empty(8, 4)
        for target in (made, other, third):
            launch((1, 1, 1), (x, y, target), (32,))
        part = third[:6]
        return x @ made.t() + made.sum(), other.t() + other.view(32)[:8], part * 2

    _, text = straight(both, torch.randn(8, 4), torch.randn(8, 4))
    assert text.count("empty_strided((8, 4), (4, 1)") == 3  # before anything writes to less
    check(both, torch.randn(8, 4), torch.randn(8, 4))


def test_results_are_views_where_they_were() -> None:
    launch = Launch()

    def returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made, other = torch.empty(8, 4), torch.empty(8, 4)
        launch((1, 1, 1), (x, y, made), (32,))
        launch((1, 1, 1), (x, y, other), (32,))
        return made, other.t()

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    recorded, _ = straight(returned, x, y)
    assert [t._is_view() for t in recorded(x, y)] == [False, True]


@pytest.mark.parametrize("prepared", [True, False])
def test_another_dtype_is_allocated_where_launches_read_none(prepared: bool) -> None:
    launch = Launch(prepared=prepared)

    def as_integers(x: Tensor, y: Tensor) -> Tensor:
        made = torch.empty(8, 4)
        launch((1, 1, 1), (x, y, made), (32,))
        return made.view(torch.int32) + 1

    text = check(as_integers, torch.randn(8, 4), torch.randn(8, 4))
    assert (".view(" in text) is not prepared


def test_launches_read_views_from_the_addresses_of_their_bases() -> None:
    launch = Launch()

    def rows(x: Tensor, y: Tensor) -> Tensor:
        made = torch.empty(2, 4)
        launch((1, 1, 1), (x[2:4], y.view(-1)[4:12][:8], made), (8,))
        return made

    text = check(rows, torch.randn(8, 4), torch.randn(8, 4))
    assert "x.data_ptr() + 32, s0.data_ptr() + 16, " in text
    assert not re.search(r"\[|view", text)

    def read_otherwise(x: Tensor, y: Tensor) -> Tensor:
        made, row = torch.empty(4), x[1]
        launch((1, 1, 1), (row, y[2], made), (4,))
        return made * row

    text = check(read_otherwise, torch.randn(8, 4), torch.randn(8, 4))
    assert "x[1]" in text
    assert "s0[2]" not in text


def in_steps(launch: Launch) -> Callable[[Tensor, Tensor], Tensor]:
    def steps(x: Tensor, y: Tensor) -> Tensor:
        first, second = torch.empty(1), torch.empty(1)
        launch((1, 1, 1), (x, y, first), (1,))
        launch((1, 1, 1), (first, y, second), (1,))
        return first * second

    return steps


def test_small_memory_is_kept_from_call_to_call(streams: list[int]) -> None:
    launch, one, two = Launch(), torch.ones(1), torch.full((1,), 2.0)
    assert "empty" not in check(in_steps(launch), one, two)
    recorded, _ = straight(in_steps(launch), one, two)
    launch.addresses.clear()
    for _ in range(3):
        recorded(one, two)
    assert len({at[-1] for at in launch.addresses}) == 2
    streams[0] = 7  # another stream may still read what was written on the first one
    recorded(one, two)
    assert len({at[-1] for at in launch.addresses}) == 4
    streams[0] = 0
    recorded(one, two)
    assert len({at[-1] for at in launch.addresses}) == 4


def test_calls_at_once_have_small_memory_of_their_own() -> None:
    launch, one, two = Launch(), torch.ones(1), torch.full((1,), 2.0)
    recorded, _ = straight(in_steps(launch), one, two)
    recorded(one, two)
    inner: list[Tensor] = []

    def between() -> None:  # as another thread may call while this one is in the middle
        launch.before = None
        inner.extend(recorded(one * 5, two))

    def start() -> None:
        launch.before = between  # at the second launch

    launch.before = start
    (outer,) = recorded(one, two)
    assert outer == 3 * 5
    assert inner == [torch.tensor([7.0 * 9.0])]


def test_what_is_captured_has_small_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = [False]
    monkeypatch.setattr(torch_internals, "cuda_captures", lambda: captures[0])
    scratch = Scratch([Allocation((1,), (1,), torch.float32, HERE)])

    def use() -> Tensor:
        (number,), free = scratch(7)
        free.append((number,))
        return number

    first = use()
    captures[0] = True
    captured = [use(), use()]
    captures[0] = False
    assert use() is first
    assert len(set(map(id, [first, *captured]))) == 3


def test_captures_are_not_asked_for_on_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises an error if it is built for CUDA and there is no driver."""
    monkeypatch.setattr(torch_internals, "cuda_captures", lambda: pytest.fail("was asked for"))
    scratch = Scratch([Allocation((1,), (1,), torch.float32, HERE)])
    (number,), free = scratch(0)
    free.append((number,))
    assert scratch(0)[0][0] is number


def test_small_memory_is_of_no_mode() -> None:
    scratch = Scratch([Allocation((1,), (1,), torch.float32, HERE)])
    with torch.inference_mode():
        (number,), _ = scratch(0)
    assert not number.is_inference()


def test_results_are_no_memory_of_other_calls() -> None:
    launch = Launch()

    def results(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second, third = torch.empty(1), torch.empty(2), torch.empty(2)
        for made in (first, second, third):
            launch((1, 1, 1), (x, y, made), (len(made),))
        return first, second.view(1, 2), *third.unbind()

    x, y = torch.ones(2), torch.ones(2)
    recorded, text = straight(results, x, y)
    assert "scratch" not in text
    before = recorded(x, y)
    recorded(x * 3, y)
    assert [t.flatten().tolist() for t in before] == [[2.0], [2.0, 2.0], [2.0], [2.0]]


@seen_whole(writes=0)
def ones_into(out: Tensor) -> Tensor:
    return out.fill_(1)


def test_what_is_returned_of_arguments_is_no_memory_of_other_calls() -> None:
    """As collectives do, which return what they have written to."""
    launch = Launch()

    def filled(x: Tensor, y: Tensor) -> Tensor:
        launch((1, 1, 1), (x, y, torch.empty(8)), (8,))
        return ones_into(torch.empty(1))

    _, text = straight(filled, torch.ones(8), torch.ones(8))
    assert "scratch" not in text


def one_more(x: Tensor) -> Tensor:
    return x + 1


def as_many(x: Tensor, count: int) -> list[Tensor]:
    return [x + 1 for _ in range(count)]


def one_more_of_each(*given: Tensor) -> tuple[Tensor, ...]:
    return torch.add(torch.stack(given), 1).unbind()


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_results_that_can_be_had_together(each: bool, prepared: bool) -> None:
    launch = Launch(prepared=prepared)
    several = one_more_of_each if each else as_many
    one: Any = seen_whole(several=several, each=each)(one_more)

    def function(x: Tensor, y: Tensor) -> Tensor:
        made = torch.empty(8)
        first = one(x)
        launch((1, 1, 1), (first, x, made), (8,))
        return one(y if each else x) + first * made

    text = check(function, torch.randn(8), torch.randn(8))
    assert ("one_more(" not in text) is prepared


def test_arguments_that_are_not_there_from_the_beginning_are_not_put_together() -> None:
    launch = Launch()
    one: Any = seen_whole(several=one_more_of_each, each=True)(one_more)

    def function(x: Tensor, y: Tensor) -> Tensor:
        made = torch.empty(8)
        first = one(x)
        launch((1, 1, 1), (first, x, made), (8,))
        return one(made) + one(y)

    assert "one_more(t" in check(function, torch.randn(8), torch.randn(8))

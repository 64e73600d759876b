"""What a recorder notes of a function is what it does, or is refused."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.core.buffer_reuse import only_reference
from opfuser.engine.recorded.functions import NotRecordableError, places
from opfuser.engine.recorded.recorder import Recorder
from opfuser.engine.recorded.text import Straight
from opfuser.runtime.recording import (
    leave,
    refuse_watching,
    seen_whole,
    unseen,
    unwatched,
    watching,
)

Function = Callable[[Tensor, Tensor], Any]
NO_CODE = compile("0", "", "eval")
NAMES = ("x", "s0")


def straight(function: Function, x: Tensor, y: Tensor, *, own: bool = False) -> Any:
    """The function that was recorded, and its text.

    Args:
        function: of two tensors.
        x, y: given.
        own: whether nobody else has the memory of ``y``.
    """
    recorder = Recorder(NO_CODE, [], dict(zip(NAMES, (x, y))), [x] if own else [x, y])
    with recorder.watching():
        results = function(x, y)
    recorder.finish()
    rows = results if isinstance(results, tuple) else (results,)
    names = [recorder.name_of(t) for t in rows]
    closing = f"({', '.join(names)},)"
    plan = Straight("forward", ", ".join(NAMES), (), (closing, names), lambda step: "")
    text = recorder.text(plan)
    namespace = dict(text.names)
    exec(text.source, namespace)
    return namespace["forward"], text.source


def _in_place(x: Tensor, y: Tensor) -> Tensor:
    made = x + y
    made.mul_(3)
    made += y
    made[0] = x[1]
    made[:, 1:] = 5.0
    torch.sub(made, x, out=made)
    return made


def _write_through_a_view(x: Tensor, y: Tensor) -> Tensor:
    made = x * 2
    row = made.view(-1)[2:4]
    row.copy_(y.flatten()[:2])
    return made


def _views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    flat, again = x.view(-1), x.reshape(12)
    scalars = x[:1, :1].squeeze() + y[0, 0].reshape(()) + x[0, :1].flatten().squeeze(0)
    return flat + 1, again * 2, x.t() - y.t(), x.T.mT.unsqueeze(0) * y, scalars


def _memory(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    made, other = torch.empty_like(x), x.new_empty(4, 3)
    torch.mul(x, y, out=made)
    other.t().copy_(x)
    return made, other


def _pieces(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first, _, last = (x + 1).split([1, 1, 2], -1)
    a, b = (y * 2)[:2].unbind()
    values, places = x.max(-1)
    return first, last, b - a, values + places


def _constants(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        x.masked_fill(y > 0, -math.inf), torch.full((2,), math.nan),
        torch.zeros(3, dtype=torch.float64) + 0.1, x * 1e-7, torch.add(x, y, alpha=-2),
        x.sum((0, 1), keepdim=True), torch.cat([x, y], dim=-1), x.clamp(min=None, max=0.5),
        x.to(torch.float64), torch.zeros(()) * -0.0, x.sub(y).div(True),
    )  # fmt: skip


def _indices(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    which = torch.arange(2)
    return x[1], x[..., 1:3], x[None, ::2], x[which], x[-1, 1:], y[[0, 2]], x.t()[:, 0]


def _overwritten(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What was computed before a write is not what is computed after it."""
    made = x * 1
    before = made.sum()
    made.zero_()
    return before, made.sum()


def _not_read(x: Tensor, y: Tensor) -> Tensor:
    """Only views and empty memory are left out."""
    x.view(-1)
    torch.empty(5)
    made = x.clone()
    made.view(-1).fill_(3)
    return made


def _operators(x: Tensor, y: Tensor) -> Tensor:
    """Of one that writes, nothing but its schema tells in inference mode."""
    made = torch.ops.aten.mul.Tensor(x, y)
    torch.ops.aten._foreach_add_.Scalar([made], 1)
    return made


FUNCTIONS: dict[str, Function] = {
    "in place": _in_place,
    "a write through a view": _write_through_a_view,
    "views": _views,
    "memory": _memory,
    "pieces": _pieces,
    "constants": _constants,
    "indices": _indices,
    "random": lambda x, y: (
        torch.nn.functional.dropout(x, 0.5) + torch.rand(3, 4) * torch.randn_like(y)
    ),
    "overwritten": _overwritten,
    "not read": _not_read,
    "no copies": lambda x, y: x.contiguous().to(torch.float32).float() + y.to(x.dtype),
    "operators": _operators,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_recorded_functions_do_the_same(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        _compare(FUNCTIONS[name])


def _compare(function: Function) -> None:
    recorded, _ = straight(function, torch.randn(3, 4), torch.randn(3, 4))
    for seed in range(3):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        before = x.clone(), y.clone()
        torch.manual_seed(seed)
        theirs = function(x, y)
        torch.manual_seed(seed)
        ours = recorded(x, y)
        rows = theirs if isinstance(theirs, tuple) else (theirs,)
        assert len(ours) == len(rows)
        for a, b in zip(ours, rows):
            assert (a.shape, a.stride(), a.dtype, a._is_view()) == (
                b.shape, b.stride(), b.dtype, b._is_view()
            )  # fmt: skip
            assert torch.equal(*[t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)])
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])


def test_results_that_were_given_are_returned() -> None:
    recorded, _ = straight(lambda x, y: (y, x.contiguous()), torch.ones(2), torch.ones(2))
    x, y = torch.ones(2), torch.ones(2)
    ours = recorded(x, y)
    assert ours[0] is y
    assert ours[1] is x


def test_names_are_deleted_after_their_last_use() -> None:
    """Memory is freed as early as where the function was recorded."""
    recorded, text = straight(lambda x, y: ((x + 1) * 2 - y).exp(), torch.ones(2), torch.ones(2))
    assert text.count("del ") == 3
    alive: list[int] = []

    class Count(torch.overrides.TorchFunctionMode):
        made: list[Any] = []  # noqa: RUF012

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            alive.append(sum(ref() is not None for ref in self.made))
            result = func(*args, **(kwargs or {}))
            self.made.append(weakref.ref(result))
            return result

    x, y = torch.ones(2), torch.ones(2)
    with Count():
        recorded(x, y)
    assert max(alive) == 1


def test_the_same_view_is_made_once() -> None:
    def twice(x: Tensor, y: Tensor) -> Tensor:
        made = x + y
        return made.view(-1).sum() + made.view(-1).max()

    _, text = straight(twice, torch.ones(2, 2), torch.ones(2, 2))
    assert text.count(".view(") == 1


@pytest.mark.parametrize("row", [lambda x, n: x[n], lambda x, n: x.narrow(0, n, 1)[0]])
def test_views_where_tensors_say_may_be_others(row: Function) -> None:
    """They are the same row where the function is recorded, and other ones later."""

    def difference(x: Tensor, y: Tensor) -> Tensor:
        return row(x, y[0].argmax()) - row(x, y[1].argmax()) + 2 * x[0]

    x, unit = torch.randn(3, 4), torch.eye(3)
    recorded, _ = straight(difference, x, unit[[0, 0]])
    for which in ([0, 0], [0, 2], [2, 1]):
        (result,) = recorded(x, unit[which])
        assert torch.equal(result, difference(x, unit[which]))


def test_other_views_of_the_memory_are_others() -> None:
    def views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = x + y
        return made[0] * 1, made[1] * 1, made[:, :2] * 1, made[:2].t() * 1, made.view(torch.int32)

    recorded, _ = straight(views, torch.ones(4, 4), torch.zeros(4, 4))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for ours, theirs in zip(recorded(x, y), views(x, y)):
        assert torch.equal(ours, theirs)


# What is refused.


_KEPT = torch.ones(3, 4)


def _writes_to_a_view(x: Tensor, y: Tensor) -> Tensor:
    x.view(-1)[0] = 1
    return x * 1


def _writes_by_an_operator(x: Tensor, y: Tensor) -> Tensor:
    torch.ops.aten.add_.Tensor(x, y)
    return x * 1


def _written_unseen(x: Tensor, y: Tensor) -> Tensor:
    made = torch.empty(3, 4)
    made.numpy()[:] = 1
    return made + x


def _sets_data(x: Tensor, y: Tensor) -> Tensor:
    made = x * 1
    made.data = y
    return made


def _reuses(x: Tensor, y: Tensor) -> Tensor:
    """As a launch would, which no version counter tells of."""
    return y + 1 if only_reference([y.detach()]) or _held([y]) else y


def _held(row: list[Tensor]) -> bool:
    if watching.watcher is not None:
        watching.watcher.note_reuse(row[0])
    return True


def _says_so(x: Tensor, y: Tensor) -> Tensor:
    refuse_watching("for a reason")
    return x + 1


def _goes_unwatched(x: Tensor, y: Tensor) -> Tensor:
    with unwatched("for a reason"):
        return x + 1


REFUSED: dict[str, Function] = {
    "a mask": lambda x, y: x[y > 0],
    "a listed mask": lambda x, y: x[(y[:, 0] > 0).to(torch.uint8), 0],
    "where": lambda x, y: torch.where(x > 0),
    "repeats": lambda x, y: x.repeat_interleave(torch.tensor([1, 2, 1]), 0),
    "reads values": lambda x, y: x * float(x.sum().item()),
    "decides by values": lambda x, y: x + 1 if bool((x > 0).all()) else x,
    "compares": lambda x, y: x + 1 if torch.equal(x, y) else x,
    "each as often": lambda x, y: torch.repeat_interleave(x[0].long()),
    "classes": lambda x, y: torch.nn.functional.one_hot(x.long()),
    "up to": lambda x, y: x[:, : x[0, 0].long()],
    "counts": lambda x, y: torch.arange(x.sum()),
    "largest": lambda x, y: x.topk(y[0, 0].long()),
    "repeated": lambda x, y: x.repeat(y[0, 0].long(), 1),
    "split": lambda x, y: torch.tensor_split(x, y[0, :1].long()),
    "different": lambda x, y: torch.ops.aten._unique2.default(x)[0],
    "picked": lambda x, y: torch.ops.aten.index.Tensor(x, [y > 0]),
    "printed": lambda x, y: x * float(f"{x.sum():.1f}"),
    "shared": lambda x, y: x * (2 if (x * 2).is_shared() else 3),
    "from elsewhere": lambda x, y: x + _KEPT,
    "returns from elsewhere": lambda x, y: _KEPT,
    "writes": lambda x, y: x.mul_(2),
    "writes to a view": _writes_to_a_view,
    "writes out": lambda x, y: torch.add(x, y, out=y),
    "writes by an operator": _writes_by_an_operator,
    # To the weight, as neither its name nor its result tells.
    "writes besides": lambda x, y: torch.nn.functional.embedding(torch.arange(2), y, None, 0.1),
    "unwritten": lambda x, y: torch.empty(3, 4) + x,
    "returns unwritten": lambda x, y: torch.empty(3, 4),
    "written unseen": _written_unseen,
    "sets data": _sets_data,
    "grad": lambda x, y: x + (1 if x.grad is None else 2),
    "version": lambda x, y: x + x._version,
    "a generator": lambda x, y: torch.rand(3, 4, generator=torch.Generator()) + x,
    "reuses": _reuses,
    "says so": _says_so,
    "goes unwatched": _goes_unwatched,
    "moves": lambda x, y: x.cpu() + 1,
    "sparse": lambda x, y: x.to_sparse(),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_differ_is_refused(name: str) -> None:
    """The function itself returns what it does where nobody watches."""
    function = REFUSED[name]
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    theirs = function(x.clone(), y.clone())
    with Recorder(NO_CODE, [], dict(zip(NAMES, (x, y))), [x, y]).watching():
        ours = function(x, y)
    rows = zip(ours, theirs) if isinstance(ours, tuple) else [(ours, theirs)]
    for a, b in rows:
        assert a.shape == b.shape
    with pytest.raises(NotRecordableError):
        straight(function, torch.ones(3, 4), torch.ones(3, 4))


# What is noted besides calls.


def test_places_that_were_asked_for() -> None:
    def asks(x: Tensor, y: Tensor) -> Tensor:
        return x + 1 if y.view(-1).data_ptr() % 16 else y * 1

    x, y = torch.ones(3, 4), torch.ones(3, 4)
    recorder = Recorder(NO_CODE, [], dict(zip(NAMES, (x, y))), [x, y])
    with recorder.watching():
        asks(x, y)
    recorder.finish()
    assert recorder.places == ["s0"]
    assert recorder.places_of_given() == places([y])


def test_memory_of_what_was_given_may_become_that_of_another_tensor() -> None:
    """Its place is no question about what was given, and it may be written to."""
    given = [torch.ones(3, 4) for _ in range(65)]
    names = [f"s{index}" for index in range(65)]
    held = places(given[1:])
    recorder = Recorder(NO_CODE, [], dict(zip(names, given)), [given[0]])
    before = {tensor.untyped_storage()._cdata for tensor in given[1:]}
    with recorder.watching():
        made = given[0] * 1
        for tensor in given[1:]:
            assert tensor.view(-1).data_ptr()
        del tensor, given[1:]
        others = [made]
        while others[-1].untyped_storage()._cdata not in before and len(others) < 5000:
            others.append(made + 1)
        assert others[-1].data_ptr()
        others[-1].add_(1)
    recorder.finish()
    assert len(others) < 5000, "memory is not used again here"
    assert recorder.places == names[1:]
    assert recorder.places_of_given() == held


def test_memory_that_is_reused() -> None:
    def reuses(x: Tensor, y: Tensor) -> Tensor:
        return y.add_(x) if _held([y]) else y + x

    recorded, _ = straight(reuses, torch.ones(2), torch.ones(2), own=True)
    y = torch.ones(2)
    assert recorded(torch.ones(2), y)[0] is y
    x, y = torch.ones(2), torch.ones(2)
    recorder = Recorder(NO_CODE, [], dict(zip(NAMES, (x, y))), [x])
    with recorder.watching():
        reuses(x, y)
    assert recorder.reused == ["s0"]


def test_tensors_given_twice() -> None:
    x = torch.ones(2)
    assert Recorder(NO_CODE, [], {"x": x, "p0": torch.ones(2), "e0": x}, []).same == [("x", "e0")]


def test_attributes_are_set_again() -> None:
    holder = SimpleNamespace(value=None)

    def sets(x: Tensor, y: Tensor) -> Tensor:
        leave(holder, "value", ("facts", x.shape))
        return x + y

    recorded, _ = straight(sets, torch.ones(2), torch.ones(2))
    holder.value = None
    recorded(torch.ones(2), torch.ones(2))
    assert holder.value == ("facts", torch.Size([2]))


def test_functions_that_are_noted_as_a_whole() -> None:
    @seen_whole(writes=0)
    def by_values(made: Tensor, limit: float) -> Tensor:
        return made.zero_() if made.sum().item() > limit else made

    @unseen
    def asks(x: Tensor) -> bool:
        return bool(x.sum() > -1e9)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return by_values(x * 1, 3.0) + 1 if asks(x) else y

    recorded, _ = straight(function, torch.ones(2), torch.ones(2))
    for value in (0.5, 5.0):
        x = torch.full((2,), value)
        assert torch.equal(recorded(x, x)[0], function(x, x))
    with pytest.raises(NotRecordableError, match="caller"):
        straight(lambda x, y: by_values(x, 3.0), torch.ones(2), torch.ones(2))


def test_what_a_function_that_is_noted_as_a_whole_reads() -> None:
    @seen_whole(reads=True)
    def counted(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(NotRecordableError, match="nothing was seen to write"):
        straight(lambda x, y: counted(torch.empty_like(x)), torch.ones(2), torch.ones(2))


class _Launch:
    """Stands for a launch, whose Triton function doubles the first tensor into the last."""

    name = "module:doubled"
    only_reads: int | None = None

    def __call__(self, grid: Any, tensors: Any, ints: Any = (), floats: Any = ()) -> None:
        with torch._C.DisableTorchFunction():
            tensors[-1].copy_(tensors[0] * ints[0] + floats[0])
        if watching.watcher is not None:
            watching.watcher.note_launch(self, grid, tensors, ints, floats)

    def prepared(self, tensors: Any, ints: Any) -> None:
        return None


def test_launches_are_repeated() -> None:
    launch = _Launch()

    def launches(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made, other = torch.empty_like(x), torch.empty_like(x)
        launch((1, 1, 1), (x, made), (2,), (0.5,))
        launch((1, 1, 1), (made, None, other), (3,), (math.inf,))
        launch((1, 1, 1), (other, other), (1,), (0.0,))
        return made, other

    recorded, _ = straight(launches, torch.ones(3), torch.ones(3))
    x = torch.randn(3)
    for ours, theirs in zip(recorded(x, x), launches(x, x)):
        assert torch.equal(ours, theirs)


def test_memory_of_the_caller_that_a_launch_only_reads_may_be_given_twice() -> None:
    launch = _Launch()
    launch.only_reads = 1

    def launches(x: Tensor, y: Tensor) -> Tensor:
        made = torch.empty_like(x)
        launch((1, 1, 1), (x, y, made), (2,), (0.0,))
        return made

    x = torch.randn(3)
    recorded, _ = straight(launches, x, x.detach())
    (doubled,) = recorded(x, x)
    assert torch.equal(doubled, 2 * x)
    launch.only_reads = None
    with pytest.raises(NotRecordableError, match="caller"):
        straight(launches, x, x.detach())


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(-1)])
def test_launches_that_write_to_memory_of_the_caller(view: Callable[[Tensor], Tensor]) -> None:
    launch = _Launch()

    def launches(x: Tensor, y: Tensor) -> Tensor:
        launch((1, 1, 1), (x, view(x)), (2,), (0.0,))
        return x * 1

    with pytest.raises(NotRecordableError, match="caller"):
        straight(launches, torch.ones(3), torch.ones(3))

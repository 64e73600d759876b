"""pytest plugin: the first call of a kind is recorded, and its recorded functions make the results.

Most tests call once or twice, while functions are recorded at the second call and used from the
third one on (``opfuser.engine.recorded.specialized``). With ``pytest -p tests.recorded_at_once``,
the first call records both passes, runs what was recorded with the same arguments, and compares:
any bit, and any relation between tensors, in which they differ fails the test. The test goes on
with the results of the recorded functions, so that whatever else it looks at holds for these, too.
Calls that compute quantized are only recorded at once: run twice, they would move their scales.

It reaches into private names where there is no other way: a pass runs a second time in the middle
of a call, with what the first one has left, which no caller can see.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from opfuser.attention.cache import PendingCache
from opfuser.engine import autograd, passes
from opfuser.engine.recorded import specialized
from opfuser.engine.recorded.guards import keywords_of
from opfuser.engine.recorded.specialized import Backward, Specialization, Specializations

specialized.CALLS_BEFORE = 0

# Tests of what is otherwise with this plugin, and why.
LEFT_OUT = {
    "test_programs.py::test_frames_above_an_operation": "counts frames, some of which are of here",
    "test_programs.py::test_the_text_is_what_runs": "counts texts of a call that is not recorded",
    "::test_nothing_waits_for_the_": "the plugin reads values on the host",
    "::test_on_a_gpu_samples_are_the_same_and_nothing_waits": "likewise",
}

DIFFERENCES: list[str] = []
COUNTS: Counter[str] = Counter()


class _Expected(NamedTuple):
    """What a pass returned when it was recorded.

    Attributes:
        results: tensors.
        views: whether each is a view.
        relations: among them, and to what it was given.
        random: states of the generators afterwards.
        program: whose pass it is.
        saved: what the pass to compare has been given as saved, if it still lives.
    """

    results: list[Tensor | None]
    views: list[bool]
    relations: list[Any]
    random: list[Tensor]
    program: Any
    saved: Sequence[Callable[[], Tensor | None]] = ()


class _Local(threading.local):
    """What is under way on a thread.

    Attributes:
        made: the specialization of the forward pass that was recorded.
        kept: what operations kept then.
        gradients: of the backward pass that was recorded.
    """

    made: Specialization | None = None
    kept: Sequence[Tensor] = ()
    gradients: _Expected | None = None


_local = _Local()
_add, _find_backward = Specializations.add, Specializations.find_backward
_execute_forward, _run_recorded = autograd.execute_forward, passes.run_recorded_backward
# By the number of a specialization, which refers to no program.
_programs: dict[int, weakref.ref[Any]] = {}


def _add_and_hold(
    self: Specializations, program: Any, recorder: Any, arguments: Any, *rest: Any
) -> Specialization | None:
    made = _add(self, program, recorder, arguments, *rest)
    _programs[id(made)] = weakref.ref(program)
    if self.quantized is not None:
        return made
    if made is not None and not made.guard(*arguments):
        DIFFERENCES.append("a call is not of the kind that was recorded of it")
    _local.made, _local.kept = made, arguments[3]
    COUNTS["forward" if made else f"forward refused: {self.reason()}"] += 1
    return made


def _forward_twice(
    program: Any,
    kwargs: Any,
    x: Tensor,
    extra_inputs: Sequence[Tensor],
    tape: Any,
    parameters: Sequence[Tensor] | None = None,
) -> Any:
    """As ``execute_forward``, with the results of the function that it recorded, if it did."""
    if torch.compiler.is_compiling():
        return _execute_forward(program, kwargs, x, extra_inputs, tape, parameters)
    _local.made = None
    before = _random_states()
    results = _execute_forward(program, kwargs, x, extra_inputs, tape, parameters)
    made, _local.made = _local.made, None
    if made is None:
        return results
    assert parameters is not None
    given = [x, *parameters, *extra_inputs, *_local.kept]
    first = results[0]
    if first._is_view():  # it may be an extra output, too, until it is detached
        first = autograd._without_base(first, given)
    recorded = [first, *results[1], *([] if tape is None else tape.saved)]
    expected = _Expected(
        recorded, _views(recorded), _relations(recorded, given), _random_states(), program
    )
    _set_random_states(before)
    keywords = keywords_of(kwargs)
    assert keywords is not None
    for pending in keywords.caches:
        cache: Any = pending
        while isinstance(cache, PendingCache):
            cache._keep = None  # of the first pass, which has stored nothing yet
            cache = cache._cache
    output, outputs, saved = made.forward(
        x, parameters, extra_inputs, _local.kept, *keywords.caches
    )
    if tape is not None:
        tape.saved[:] = saved
    _compare(expected, [output, *outputs, *([] if tape is None else saved)], given)
    return output, outputs


def _record_on_copies(
    self: Specializations,
    special: Specialization,
    dy: Tensor,
    received: Sequence[Tensor | None],
    saved: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    keep: bool,
) -> Any:
    """As ``Specializations.find_backward``; what is due is recorded on copies, and used.

    A recorded pass may overwrite what forward has saved, and counts references to it: copies have
    as many as the tensors of a call.
    """
    found = _find_backward(self, special, dy, received, saved, kept, keep)
    program = _programs[id(special)]()
    assert program is not None
    if found is not None or self.quantized is not None:
        COUNTS["backward used"] += found is not None
        return found
    if self.due_backward(program, special, dy, received, saved, kept, keep) is None:
        COUNTS[f"backward refused: {special.refusal}"] += 1
        return None
    before = _random_states()
    count = len(received)
    own = [True] * (1 + count) + [*special.own, *[False] * (len(saved) - len(special.own))]
    own_dy, *rest = _copies([dy, *received, *saved], own)
    own_received, own_saved = rest[:count], rest[count:]
    del rest
    others = own_saved[:] if keep else ()  # autograd has what it saved, too
    held = list(map(_reference, own_saved))
    assert own_dy is not None
    due = self.due_backward(program, special, own_dy, own_received, own_saved, kept, keep)
    assert due is not None
    with due.recorder.watching():
        grads = passes._run_backward(
            program, own_dy, own_received, own_saved, special.contexts, None
        )
    self.add_backward(program, due, grads)
    del others
    made = special.backwards.get(due.key)
    if not isinstance(made, Backward):
        COUNTS[f"backward refused: {special.refusal}"] += 1

        def results(dy: Any, received: Any, saved: list[Any], kept: Any) -> list[Tensor | None]:
            saved.clear()
            return grads

        return Backward(results, (), (), None, (), (), (), shares=True)
    COUNTS["backward"] += 1
    relations = _relations(grads, [own_dy, *own_received, *[ref() for ref in held]])
    refs = list(map(_reference, saved))
    random = _random_states()
    _local.gradients = _Expected(grads, _views(grads), relations, random, program, refs)
    _set_random_states(before)
    return _find_backward(self, special, dy, received, saved, kept, keep)


def _run_and_compare(
    program: Any,
    special: Specialization,
    found: Backward,
    dy: Tensor,
    received: Sequence[Tensor | None],
    saved: list[Tensor | None],
    kept: Sequence[Tensor],
) -> list[Tensor | None]:
    """As ``run_recorded_backward``, compared with what ran if that was recorded just now."""
    grads = _run_recorded(program, special, found, dy, received, saved, kept)
    expected, _local.gradients = _local.gradients, None
    if expected is not None:
        _compare(expected, grads, [dy, *received, *[ref() for ref in expected.saved]])
    return grads


def _reference(t: Tensor | None) -> Callable[[], Tensor | None]:
    return (lambda: None) if t is None else weakref.ref(t)


def _copies(tensors: Sequence[Tensor | None], own: Sequence[bool]) -> list[Tensor | None]:
    """Copies of those that are marked, related to each other as the tensors are."""
    storages: dict[int, Any] = {}
    made: dict[int, Tensor] = {}

    def copy(t: Tensor) -> Tensor:
        if id(t) not in made:
            storage = t.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = storage.clone()
            whole = t._base if t._is_view() else t
            assert whole is not None
            place = storages[storage._cdata], whole.storage_offset(), whole.shape, whole.stride()
            made[id(t)] = torch.empty(0, dtype=whole.dtype, device=t.device).set_(*place)
            if t._is_view():  # which has one more reference to its memory
                with torch.no_grad():
                    own = made[id(t)].view(t.dtype)
                    made[id(t)] = own.as_strided(t.shape, t.stride(), t.storage_offset())
        return made[id(t)]

    return [copy(t) if t is not None and mine else t for t, mine in zip(tensors, own)]


def _relations(results: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> list[Any]:
    """Which results are what was given, or each other, and which share memory with each other."""
    rows = [*given, *results]
    memories = [None if t is None else t.untyped_storage()._cdata for t in results]
    made: list[Any] = []
    for t, memory in zip(results, memories):
        if t is None:
            made.append(None)
            continue
        first = next(n for n, other in enumerate(rows) if other is t)
        others = memories.index(memory), t.storage_offset(), t.requires_grad
        made.append((first, *others) if first >= len(given) else first)
    return made


def _views(tensors: Sequence[Tensor | None]) -> list[bool]:
    return [t is not None and t._is_view() for t in tensors]


def _compare(
    expected: _Expected, results: Sequence[Tensor | None], given: Sequence[Tensor | None]
) -> None:
    """Notes how results differ from those that are expected."""
    with torch.no_grad():
        found = [
            f"result {n}: {difference}"
            for n, pair in enumerate(zip(expected.results, results, strict=True))
            if (difference := _difference(*pair))
        ]
    relations = _relations(results, given)
    # A view of a whole result may be the result itself where it was recorded.
    if any(t is not None and t._is_view() > old for t, old in zip(results, expected.views)):
        found.append("a result is a view")
    if not found and relations != expected.relations:
        found.append(f"relations {relations} in place of {expected.relations}")
    if not all(map(torch.equal, expected.random, _random_states())):
        found.append("another state of the random numbers")
    if found:
        names = [type(op).__name__ for op in expected.program.plan.basic_ops]
        DIFFERENCES.append(f"{names}: {'; '.join(found)}")


def _difference(a: Tensor | None, b: Tensor | None) -> str:
    """How two tensors differ; empty if they do not."""
    if a is None or b is None:
        return "" if a is b else f"{a is None}, {b is None}"
    for name in ("shape", "dtype", "device", "layout"):
        if getattr(a, name) != getattr(b, name):
            return f"{name} {getattr(a, name)}, {getattr(b, name)}"
    if a.stride() != b.stride():
        return f"strides {a.stride()}, {b.stride()}"
    if a.dtype.is_floating_point and a.element_size() == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    if torch.equal(a, b) and not a.dtype.is_floating_point:
        return ""
    if a.is_cuda and a.dtype in (torch.int64, torch.uint64) and a.numel() <= 2:
        return ""  # seed and offset of attention without dropout, to which nothing is written
    if a.dtype.is_floating_point:
        equal = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
        if bool(equal.all()):
            return ""
    return f"values: {a.flatten()[:4].tolist()}, {b.flatten()[:4].tolist()}"


def _random_states() -> list[Tensor]:
    gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpu]


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


autograd.execute_forward = _forward_twice
autograd.run_recorded_backward = passes.run_recorded_backward = _run_and_compare
Specializations.add = _add_and_hold  # type: ignore[method-assign]
Specializations.find_backward = _record_on_copies  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips :data:`LEFT_OUT`."""
    for item in items:
        for name, reason in LEFT_OUT.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fails a test in which recorded functions made something else."""
    DIFFERENCES.clear()
    yield
    if DIFFERENCES:
        pytest.fail("recorded functions differ:\n" + "\n".join(dict.fromkeys(DIFFERENCES)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tells how many passes were recorded, and why others were not."""
    terminalreporter.section("recorded at once")
    for what, count in COUNTS.most_common():
        terminalreporter.write_line(f"{count:6} {what}")

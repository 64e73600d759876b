"""A plan as a program: two functions in Python, written once per plan, that do what it says."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from ..core.context import GradNeeds, held
from ..core.fusion import Stage
from ..core.op_base import BasicOperation, FusedOperation, FusibleOperation
from ..core.op_base.kinds import is_built_in
from .emission import PLAIN, Emission, Layout, emit_backward, emit_forward
from .lines import Text
from .plan import Plan, RecordedCalls, Step
from .recorded.specialized import Specializations
from .routing import Routing

_layouts: dict[Hashable, int] = {}
_numbers = count()

TRACED = Emission(traced=True)


class _Function(NamedTuple):
    """A function of a program, and the step of each of its lines."""

    function: Callable[..., Any]
    steps: tuple[Step | None, ...]


class Program:
    """A plan, and the functions that execute it.

    The functions are written when they are first asked for, each in as many emissions as calls
    ask for. Debuggers, tracebacks and profilers find their text under the name of their file.

    Args:
        plan: the steps, with the wiring of their operations.

    Attributes:
        outputs, inputs: of the routing.
        num_parameters: of all operations.
        needs_backward: whether a call records what backward needs.
        kept_parameters: positions of those that are saved for backward, and whether their data are
            held.
        without_grad: positions of the extra outputs that have no gradient.
        prepared_ops: operations with a ``pre_fuser_forward``, and whether they need gradients.
        verified: kinds of calls that were verified; None where all is the library's own.
        specializations: functions for calls that are alike in shapes, too.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.wiring is not None  # as of a plan that joins others
        routing, num_parameters, paths = plan.wiring
        self.plan = plan
        self.paths = paths
        self.outputs = routing.outputs
        self.inputs = routing.inputs
        ends = [0]
        for number in num_parameters:
            ends.append(ends[-1] + number)
        spans = tuple(pairwise(ends))
        self.num_parameters = ends[-1]
        self.needs_backward = any(need is not None for need in plan.needs)
        kept: list[tuple[int, bool]] = []
        reads: list[tuple[int, int] | None] = []
        for (start, stop), op, need in zip(spans, plan.basic_ops, plan.needs):
            if op.backward_reads_parameters and need is not None:
                reads.append((len(kept), len(kept) + stop - start))
                kept += [(start + n, op.holds_data(n)) for n in range(stop - start)]
            else:
                reads.append(None)
        self.kept_parameters = tuple(kept)
        needs = _needs_of_steps(plan, routing, num_parameters)
        self._text_layout = Layout(plan, routing, needs, spans, tuple(reads), paths)
        steps = [step.op for step in (*plan.forward, *plan.backward)]
        known = all(is_built_in(op) for op in (*plan.basic_ops, *steps))
        self.verified: set[Any] | None = None if known else set()
        self._layout: int | None = None
        self.without_grad = tuple(
            n for n, slot in enumerate(routing.outputs) if plan.needs[slot.op] is None
        )
        prepared = (BasicOperation, FusibleOperation)
        self.prepared_ops = tuple(
            (op, need is not None)
            for op, need in zip(plan.basic_ops, plan.needs)
            if not any(type(op).pre_fuser_forward is base.pre_fuser_forward for base in prepared)
        )
        self._number = next(_numbers)
        self._files: list[str] = []
        weakref.finalize(self, _forget_texts, self._files).atexit = False
        self._functions: dict[tuple[Stage, Emission], _Function] = {}
        self._replace: Callable[[Step, Stage], Any] | None = None
        self._traced_forward: Callable[..., Any] | None = None
        self._traced_backward: Callable[..., Any] | None = None
        self._specialized: list[_Function] = []
        self.specializations = Specializations(self)

    def kept(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What is saved of a call's parameters besides what operations save."""
        return [
            held(parameters[n]) if holds else parameters[n] for n, holds in self.kept_parameters
        ]

    def layout(self) -> int:
        """A number that differs between programs that may save different tensors.

        A forward fusion saves what its operations save; a joint one chooses what it saves.
        """
        if self._layout is None:
            plan = self.plan
            again = {id(step.op) for step in plan.backward if isinstance(step.op, FusedOperation)}
            joint = [(type(s.op), s.indices) for s in plan.forward if id(s.op) in again]
            key = (*joint, self._text_layout.needs)
            self._layout = _layouts.setdefault(key, len(_layouts))
        return self._layout

    def text(self, stage: Stage, emission: Emission = PLAIN) -> Text:
        """The text of the function of a pass, "forward" or "backward"."""
        emit = emit_forward if stage == "forward" else emit_backward
        return emit(self._text_layout, emission)

    def function(self, stage: Stage, emission: Emission = PLAIN) -> Callable[..., Any]:
        """The function of a pass: :func:`emit_forward` and :func:`emit_backward` say what of."""
        found = self._functions.get((stage, emission))
        return (self._compile(stage, emission) if found is None else found).function

    def prepare_tracing(self) -> None:
        """Writes what :meth:`traced` returns, which cannot be done while Dynamo traces."""
        self._traced_forward = self.function("forward", TRACED)
        self._traced_backward = self.function("backward", TRACED)

    def traced(self, stage: Stage) -> Callable[..., Any]:
        """As :meth:`function`, for torch.compile to trace."""
        prepared = self._traced_forward if stage == "forward" else self._traced_backward
        return prepared or self.function(stage, TRACED)

    def step_of(self, error: BaseException) -> Step | None:
        """The step whose line an exception came through; None if it came through none."""
        functions = [*list(self._functions.values()), *self._specialized]
        codes: dict[CodeType, tuple[Step | None, ...]] = {
            found.function.__code__: found.steps for found in functions
        }
        traceback = error.__traceback__
        while traceback is not None:
            steps = codes.get(traceback.tb_frame.f_code)
            if steps is not None:
                return steps[traceback.tb_lineno - 1]
            traceback = traceback.tb_next
        return None

    @contextmanager
    def watched(self, replace: Callable[[Step, Stage], Any]) -> Iterator[None]:
        """Within it, something else is called in place of the operation of each step."""
        before, self._functions, self._replace = self._functions, {}, replace
        try:
            yield
        finally:
            self._functions, self._replace = before, None

    def lines(self, stage: Stage) -> tuple[CodeType, tuple[Step | None, ...]]:
        """The code of the function of a pass, and the step of each of its lines."""
        function = self.function(stage)
        return function.__code__, self._functions[stage, PLAIN].steps

    def specialize(self, stage: Stage, text: Text) -> Callable[..., Any]:
        """A function for calls of a kind, given its text."""
        made = self._written(stage, text, f" specialized {len(self._specialized)}")
        self._specialized.append(made)
        return made.function

    def recordings(self) -> RecordedCalls:
        """What was recorded of the calls."""
        files = [found.function.__code__.co_filename for found in self._specialized]
        texts = tuple("".join(linecache.getlines(file)) for file in files)
        indices = tuple(range(len(self.plan.basic_ops)))
        return RecordedCalls(indices, texts, self.specializations.reason())

    def _compile(self, stage: Stage, emission: Emission) -> _Function:
        asked_for = "".join(f" {name}" for name, asked in emission._asdict().items() if asked)
        made = self._written(stage, self.text(stage, emission), asked_for)
        return self._functions.setdefault((stage, emission), made)  # or another thread's

    def _written(self, stage: Stage, text: Text, asked_for: str) -> _Function:
        file = f"<opfuser program {self._number}: {stage}{asked_for}>"
        names = dict(text.names)
        if self._replace is not None:
            for name, step in text.operations.items():
                names[name] = self._replace(step, stage)
        # Before linecache: Dynamo, which meets this in compiled autograd and gives up here, would
        # guard all that it caches.
        exec(compile(text.source, file, "exec"), names)
        if self._replace is None:
            linecache.cache[file] = len(text.source), None, text.source.splitlines(True), file
            self._files.append(file)
        # Not among its own globals: that cycle would keep the operations, and their parameters.
        return _Function(names.pop(stage), text.steps)


def _forget_texts(files: Sequence[str]) -> None:
    for file in files:
        linecache.cache.pop(file, None)


def _needs_of_steps(
    plan: Plan, routing: Routing, num_parameters: Sequence[int]
) -> tuple[GradNeeds | None, ...]:
    """The plan's needs; an operation that owes no gradient but shares a backward step saves too."""
    needs = list(plan.needs)
    for step in plan.backward:
        if any(plan.needs[i] is not None for i in step.indices):
            for i in step.indices:
                nothing = (False,) * num_parameters[i], (False,) * len(routing.sources[i])
                needs[i] = needs[i] or GradNeeds(False, *nothing)
    return tuple(needs)


def program_text(plan: Plan) -> str:
    """The text that ``print(plan.program)`` shows, without a line's end at its end."""
    if plan.wiring is None:
        return "\n\n\n".join(_texts_of_groups(plan.groups))
    program = Program(plan)
    stages: tuple[Stage, ...] = ("forward", "backward") if program.needs_backward else ("forward",)
    return "\n".join(program.text(stage).source for stage in stages).rstrip("\n")


def _texts_of_groups(plans: Sequence[Plan]) -> Iterator[str]:
    first = 0
    for plan in plans:
        last = first + len(plan.basic_ops) - 1
        which = f"operation {first}" if first == last else f"operations {first} to {last}"
        counted = ", counted from 0 below" if first else ""
        heading = f"# {which}{counted}\n" if len(plans) > 1 else ""
        yield heading + program_text(plan)
        first = last + 1

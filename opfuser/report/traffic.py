"""Launches, traffic and saved bytes of the steps of a plan, as they would be on a GPU.

The model. A step is what its kernels do: each reads the tensors that it is given once, and writes
its results once. Caches are not modeled: what one kernel writes and the next one reads counts
twice, and a tensor that is read by two kernels counts twice too. So the traffic of a fusion is
smaller by exactly the tensors that no longer leave the chip. In particular

- a kernel of the library is one launch, which touches all tensors that it is given;
- a function of ATen that returns no view is one launch; GEMMs among them read both operands and
  write the result, whatever they tile;
- a look-up in a table reads as much of the table as it returns;
- attention is one launch in each pass if a kernel takes it on a GPU;
- allocations and views are nothing.

Saved bytes are what autograd keeps from forward to backward: each storage once, parameters and
buffers left out, the input of the model counted in.

The model is run on the meta device, without data. What reads values, such as experts in fp32 that
read how many rows each has, cannot be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.fusion import Stage
from ..engine.plan import Plan, Step
from ..engine.program import Program
from ..engine.recorded.functions import tensors_in
from ..errors import TargetError
from ..sequential import Sequential
from ..torch_internals import memory_of, storage_address
from .kernel_counts import Counts, KernelCounter, counting
from .observing import observed
from .sizes import in_bytes
from .target import Target, failed, moved


class StepTraffic(NamedTuple):
    """What one step of a plan does in one call of the model, however often that calls the step.

    Attributes:
        stage: the pass.
        indices: of the basic operations that it covers; none for a plain module, whose kernels are
            not told apart.
        counts: launches, and bytes read and written.
        saved: in forward, bytes that it keeps for backward and that no earlier step keeps.
    """

    stage: Stage
    indices: tuple[int, ...]
    counts: Counts
    saved: int = 0


class Totals(NamedTuple):
    """Launches and bytes of a call and its backward: what every format shows of them.

    Attributes:
        launches: kernels.
        read, written: bytes.
        saved_bytes: kept for backward.
        elsewhere: of these, what runs outside of the operations of Sequentials.
    """

    launches: int
    read: int
    written: int
    saved_bytes: int
    elsewhere: Counts = Counts()

    @property
    def figures(self) -> tuple[tuple[str, str], ...]:
        """Numbers for people, each with what it counts."""
        return (
            (str(self.launches), _launches(self.launches)),
            (in_bytes(self.read), "read"),
            (in_bytes(self.written), "written"),
            (in_bytes(self.saved_bytes), "saved for backward"),
        )

    @property
    def outside(self) -> str:
        """What of it no operation of a Sequential launches, for people; empty if there is none."""
        launches, read, written = self.elsewhere
        if not launches:
            return ""
        return (
            f"of these outside of operations: {launches} {_launches(launches)}, "
            f"{in_bytes(read)} read, {in_bytes(written)} written"
        )


def _launches(count: int) -> str:
    return "launch" if count == 1 else "launches"


class Traffic(NamedTuple):
    """What the steps of one plan do in one call of the model.

    Attributes:
        plan: which was followed.
        forward, backward: the steps of each pass, as in the plan, both in forward order.
        saved: bytes kept for backward by the basic operation that keeps them first, by index.
    """

    plan: Plan
    forward: tuple[StepTraffic, ...]
    backward: tuple[StepTraffic, ...]
    saved: Mapping[int, int]

    @property
    def counts(self) -> Counts:
        """Counts of both passes."""
        return total(step.counts for step in (*self.forward, *self.backward))

    @property
    def saved_bytes(self) -> int:
        """Kept for backward by all operations."""
        return sum(self.saved.values())


class ModelTraffic(NamedTuple):
    """What a model does in one call of it, and in the backward of that.

    Attributes:
        sequences: by the path of the Sequential.
        elsewhere: what runs outside of their steps: plain modules, and sums of gradients.
        saved_bytes: kept for backward by all of the model.
    """

    sequences: dict[str, Traffic]
    elsewhere: Counts
    saved_bytes: int

    @property
    def counts(self) -> Counts:
        """Sum over the whole model, in both passes."""
        return total(t.counts for t in self.sequences.values()).plus(self.elsewhere)

    @property
    def totals(self) -> Totals:
        """Sum over the whole model."""
        return Totals(*self.counts, self.saved_bytes, self.elsewhere)

    def only(self, *paths: str) -> ModelTraffic:
        """What the steps of some of the Sequentials do.

        Args:
            *paths: of Sequentials; those that were not called are left out.
        """
        own = {path: self.sequences[path] for path in paths if path in self.sequences}
        return ModelTraffic(own, Counts(), sum(t.saved_bytes for t in own.values()))


def model_traffic(target: Target) -> ModelTraffic:
    """What a model does in one call, and in the backward of that where a gradient is needed.

    Args:
        target: the model and inputs, on any device; a copy without data is run.

    Raises:
        TargetError: the model cannot be run without data.
    """
    meta = torch.device("meta")
    inputs = tuple(t.detach().to(meta).requires_grad_(t.requires_grad) for t in target.inputs)
    target = Target(target.name, moved(target.model, meta, None), inputs)
    try:
        # Makes the plans, which the second call follows. Kernels are noted here too, as what stands
        # for them in plain torch takes longer.
        with counting(), observed(target.model) as found:
            target.model(*inputs)
        with _watched([(c.path, c.sequence) for c in found], target.model) as run:
            _train(target.model(*inputs), [*target.model.parameters(), *inputs], run.counter)
    except Exception as error:
        raise TargetError(failed(target, error, _NO_DATA)) from error
    return run.result({call.path: call.plan for call in found})


_NO_DATA = "Launches and bytes are counted without data, so that nothing may read values"


def _train(outputs: Any, leaves: Iterable[Tensor], counter: KernelCounter) -> None:
    """The backward of all outputs that need one; leaves no gradients behind."""
    roots = [t for t in tensors_in(outputs) if t.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if roots:
        grads = [torch.empty_like(t) for t in roots]
        counter.fill(grads)  # they are the caller's
        torch.autograd.grad(roots, wanted, grads, allow_unused=True)


def total(counts: Iterable[Counts]) -> Counts:
    """The sum of counts."""
    return reduce(Counts.plus, counts, Counts())


class _Part(NamedTuple):
    """A step, as the counter names it."""

    path: str
    stage: Stage
    indices: tuple[int, ...]


class _Run:
    """One call of a model: who runs what, and what is kept for backward."""

    def __init__(self, counter: KernelCounter, held: Iterable[Tensor]) -> None:
        self.counter = counter
        self.saved: dict[str, dict[int, int]] = {}
        self.saved_bytes = 0
        self._held = {memory_of(t) for t in held}
        # By address, which a weak reference keeps from being used twice.
        self._by_steps: dict[int, StorageWeakRef] = {}
        self._by_autograd: dict[int, StorageWeakRef] = {}

    def keep(self, t: Tensor) -> Tensor:
        """Notes what autograd saves."""
        self.saved_bytes += self._new(t, self._by_autograd)
        return t

    def note_saved(self, path: str, index: int, tensors: Iterable[Any]) -> None:
        """Notes what an operation hands to its backward."""
        of_path = self.saved.setdefault(path, {})
        for t in tensors:
            if isinstance(t, Tensor):
                size = self._new(t, self._by_steps)
                if size:
                    of_path[index] = of_path.get(index, 0) + size

    def _new(self, t: Tensor, seen: dict[int, StorageWeakRef]) -> int:
        storage = t.untyped_storage()
        at = storage_address(storage)
        if at in self._held or at in seen:
            return 0
        seen[at] = StorageWeakRef(storage)
        return storage.nbytes()

    def result(self, plans: Mapping[str, Plan]) -> ModelTraffic:
        counts = dict(self.counter.counts)
        sequences = {}
        for path, plan in plans.items():
            saved = self.saved.get(path, {})
            passes: dict[str, tuple[StepTraffic, ...]] = {}
            for stage, steps in (("forward", plan.forward), ("backward", plan.backward)):
                passes[stage] = tuple(
                    StepTraffic(
                        stage,  # type: ignore[arg-type]
                        step.indices,
                        counts.pop(_Part(path, stage, step.indices), Counts()),  # type: ignore[arg-type]
                        sum(saved.get(i, 0) for i in step.indices) if stage == "forward" else 0,
                    )
                    for step in steps
                )
            sequences[path] = Traffic(plan, passes["forward"], passes["backward"], saved)
        return ModelTraffic(sequences, total(counts.values()), self.saved_bytes)


@contextmanager
def _watched(sequences: Sequence[tuple[str, Sequential]], model: nn.Module) -> Iterator[_Run]:
    """Counts what runs inside, by the steps of the plans that these sequences used last."""
    with ExitStack() as stack:
        run = _Run(stack.enter_context(counting()), [*model.parameters(), *model.buffers()])
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(run.keep, lambda t: t))
        for path, sequence in sequences:
            first = 0
            for program in _programs(sequence):
                stack.enter_context(program.watched(_watcher(run, path, first)))
                first += len(program.plan.basic_ops)
        yield run


def _programs(sequence: Sequential) -> Iterator[Program]:
    """Programs that the last call followed, in the order in which its plan joins their plans."""
    for group in sequence._groups:
        if isinstance(group.callee, Sequential):
            yield from _programs(group.callee)
        else:
            yield from (f._used for f in group.fusers() if f._used is not None)


def _watcher(run: _Run, path: str, first: int) -> Callable[[Step, Stage], _WatchedOperation]:
    def watch(step: Step, stage: Stage) -> _WatchedOperation:
        part = _Part(path, stage, tuple(first + i for i in step.indices))
        return _WatchedOperation(step.op, run, part)

    return watch


class _WatchedOperation:
    """Stands for an operation in a program, and tells the counter when it runs."""

    def __init__(self, op: Any, run: _Run, part: _Part) -> None:
        self._op, self._run, self._part = op, run, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def _counted(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._run.counter.enter(self._part)
        try:
            return function(*args, **kwargs)
        finally:
            self._run.counter.enter(before)

    def _note(self, ctxs: Iterable[Any]) -> None:
        for index, ctx in zip(self._part.indices, ctxs):
            if ctx.requires_grad and ctx.to_save is not None:
                self._run.note_saved(self._part.path, index, ctx.to_save)

    def op_forward(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        y = self._counted(self._op.op_forward, ctx, *args, **kwargs)
        self._note([ctx])
        return y

    def fuser_forward(self, ctxs: Any, *args: Any, **kwargs: Any) -> Any:
        y = self._counted(self._op.fuser_forward, ctxs, *args, **kwargs)
        self._note(ctxs)
        return y

    def op_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._counted(self._op.op_backward, *args, **kwargs)

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._counted(self._op.fuser_backward, *args, **kwargs)

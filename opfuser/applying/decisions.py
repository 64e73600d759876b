"""What computes the calls of a module: a sequence of operations, or its own forward and why."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.context import autocast_dtype
from ..errors import ArgumentError
from ..merged_linear import MergedLinear
from ..quantization.region import autocast
from ..quantization.weights import quantized_model_init
from ..reading.built import Built
from ..reading.call_key import CallKey, call_key, small_call
from ..reading.construction import build
from ..reading.dataflow import Dataflow, Value, tensors_in
from ..reading.grammar import read
from ..reading.kept import KeptError, NotNowError
from ..reading.observed import FILLS_A_CACHE
from ..reading.operations import (
    Activation,
    Bias,
    Called,
    Dropout,
    Linear,
    Parallel,
    Reading,
    Reorder,
    Residual,
    Scale,
    Transpose,
)
from ..reading.reads import Reads, is_scalar
from ..reading.siblings import exchanged_reads, sibling_reads
from ..reading.sizes import Size
from ..reading.stand_ins import LayerIndex
from ..reading.tracer import Trace, device_of, trace
from .deferred import Head
from .descriptions import masks_in, operations_in
from .memo import Memo

# A module that calls more than that is not read as one: its parts are.
_MODULES_AT_MOST = 200
# So many siblings are traced without success before the others are taken to be the same.
_FAILURES = 3
# Where no size is larger, a call takes no longer to read than a small one in its place.
_LARGE = 64
# Of each class, so many traces are remembered.
_TRACES = 64
# One of these alone is what torch computes as well, with less to do before.
_ALONE = Linear | Activation
_WITH_OTHERS = Bias | Called | Dropout | Parallel | Reorder | Residual | Scale | Transpose


@dataclass(eq=False)
class Decision:
    """What computes the calls of one kind of one module.

    Attributes:
        reason: why the module's own forward does; empty if a sequence does.
        trace: of a call; None if there is none.
        reads: what the module's forward reads; None without a trace.
        reading: what was read; None if the module's own forward computes.
        built: the sequence, as long as it is current.
        masks: the numbers of the inputs that attention is masked with, and are added to its scores;
            and whether one may hide no key that others leave to a query, in any call.
        places: where the forward returns outputs and inputs of the call, for :func:`arranged`; None
            if it returns one output alone.
        changes: how many changes of the model were noticed before.
        tried: whether the sequence has computed a call.
        calls: how many there were.
        head: what defers its results; None if nothing does.
    """

    reason: str = ""
    trace: Trace | None = None
    reads: Reads | None = None
    reading: Reading | None = None
    built: Built | None = None
    masks: tuple[tuple[int, bool], ...] = ()
    places: Any = None
    changes: int = 0
    tried: bool = False
    calls: int = 0
    head: Head | None = None

    def count(self) -> int:
        """How many calls there were that no loss alone was computed of."""
        return self.calls + (self.head.calls if self.head is not None else 0)

    def current(self, application: Application) -> bool:
        """Whether it would be found out again."""
        reads = self.reads
        return reads.current() if reads else self.changes == application.changes

    def takes(self, key: CallKey, module: nn.Module) -> bool:
        """Whether it holds for calls of its module with a key, as long as it is current."""
        trace = self.trace
        return trace is not None and trace.key.facts == key.facts and trace.takes(key, module)

    def give_up(self, reason: str) -> None:
        """Leaves calls to the module's own forward."""
        self.built = self.reading = None
        self.reason = reason

    def exchange_parameters(self) -> bool:
        """Goes on with the parameters that are there now, if nothing else has changed."""
        reads = None if self.reads is None else exchanged_reads(self.reads)
        if reads is None:
            return False
        before, self.reads = self.reads, reads
        if self.trace is not None and self.trace.reads is before:  # not to hold the old ones
            self.trace.reads = reads
        for built in (self.built, self.head):
            if built is not None:
                built.follow()
        return True

    def retire(self) -> None:
        """Takes no more calls, as something has changed that was read."""
        self.trace = self.reads = self.built = self.head = None
        self.changes = -1


@dataclass(eq=False)
class _Read:
    """A trace, and what was read of it or why nothing was.

    ``alone`` says that it is read as a linear function, which torch computes as well.
    """

    trace: Trace
    reading: Reading | None = None
    reason: str = ""
    places: Any = None
    alone: bool = False


class _Local(threading.local):
    tracing = False
    within = False


@dataclass(eq=False)
class Application:
    """What the modules of a model have in common to which ``apply`` was applied.

    Attributes:
        fused_loss: whether linear modules may defer logits.
        merge_storages: whether weights that are multiplied at once are moved into one storage.
        changes: how often it was noticed that something has changed that a forward had read.
        local: whether this thread traces a forward, and whether it is within a call of the model.
        memo: of what sequences are given.
        warned: whether a warning said what torch.compile keeps.
    """

    fused_loss: bool = False
    merge_storages: bool = False
    changes: int = 0
    local: _Local = field(default_factory=_Local)
    memo: Memo = field(default_factory=Memo)
    warned: bool = False
    _read_before: dict[type, list[_Read]] = field(default_factory=lambda: defaultdict(list))
    _failed: dict[Hashable, list[str]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __deepcopy__(self, memo: dict[int, Any]) -> Application:
        return Application(self.fused_loss, self.merge_storages)

    def decide(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: list[Decision],
    ) -> tuple[Decision, tuple[int, ...]]:
        """What computes a call of a module, and others like it: one that is known, or a new one.

        Returns:
            This, and the sizes that the call has and others may have differently.

        Raises:
            NotNowError: if that cannot be found out in this call.
        """
        with self._lock:
            self.local.tracing = True
            try:
                # Operations have neither weights nor scales of their own.
                with autocast(enabled=False), quantized_model_init(enabled=False):
                    return self._decide(module, args, kwargs, known)
            except NotNowError:
                raise
            # The module's own forward is right whatever the reader stumbles over.
            except Exception as error:  # noqa: BLE001
                return Decision(_reason_of(error), changes=self.changes), ()
            finally:
                self.local.tracing = False

    def _decide(
        self, module: nn.Module, args: Any, kwargs: Any, known: list[Decision]
    ) -> tuple[Decision, tuple[int, ...]]:
        key = call_key(module, args, kwargs)
        for decision in known:
            if decision.takes(key, module):
                if decision.current(self) or decision.exchange_parameters():
                    return decision, key.sizes
                decision.retire()
                self.changes += 1
        return self._new(module, args, kwargs, key), key.sizes

    def _new(self, module: nn.Module, args: Any, kwargs: Any, key: CallKey) -> Decision:
        for one in self._read_before[type(module)]:
            if one.trace.key.facts == key.facts and one.trace.takes(key, module):
                reads = sibling_reads(one.trace.reads, module)
                if reads is not None:
                    return self._decision(module, one, reads)
        one = self._read(module, args, kwargs, key)
        return self._decision(module, one, one.trace.reads)

    def _decision(self, module: nn.Module, one: _Read, reads: Reads) -> Decision:
        made = Decision(one.reason, one.trace, reads, changes=self.changes)
        if one.reading is not None and one.places is None and self._differentiates(module):
            made.head = Head.of(one.reading, module)
        if one.reading is not None and not one.alone:
            made.reading, made.places = one.reading, one.places
            made.built = build(one.reading, module).leave_scales()
            made.masks = masks_in(one.reading)
            self.memo.share(made.built)
            if self.merge_storages:
                _merge(made.built)
            _renumber(made.built, one.trace.reads, reads)
        return made

    def _differentiates(self, module: nn.Module) -> bool:
        """Whether a loss may be computed without logits."""
        return self.fused_loss and module.training and torch.is_grad_enabled()

    def _read(self, module: nn.Module, args: Any, kwargs: Any, key: CallKey) -> _Read:
        _check(module, args, kwargs)
        failed = self._failed[type(module), key.facts]
        if len(failed) >= _FAILURES and len(set(failed)) == 1:
            raise KeptError(failed[0])
        try:
            traced = _traced(module, args, kwargs, key)
        except NotNowError:
            raise
        except KeptError as kept:
            failed.append(kept.reason)
            raise
        if any(node.effect == FILLS_A_CACHE for node in traced.dataflow.nodes):
            failed.append(FILLS_A_CACHE)  # as others do not, once their own forward was called
            raise NotNowError(FILLS_A_CACHE)
        found = _Read(traced)
        before = self._read_before[type(module)]
        current = (one for one in before if one.trace.reads.current_but_parameters())
        before[:] = [*current, found][-_TRACES:]
        try:
            found.places = _arrangement(found.trace.dataflow)
            autocast = autocast_dtype(device_of(module, args, kwargs))
            found.reading = read(found.trace.dataflow, autocast)
            check_modes(found.trace.dataflow, found.reading)
            build(found.reading, module)
        except Exception as error:  # noqa: BLE001 - as in `decide`
            found.reading, found.reason = None, _reason_of(error)
        else:
            if not _is_worth_it(found.reading):
                found.reason = "has nothing to fuse, so torch computes it"
                found.alone = [*map(type, found.reading.operations)] == [Linear]
                found.reading = found.reading if found.alone else None
        # What is read of a trace from now on holds no tensor of the call.
        found.trace.dataflow = Dataflow()
        found.trace.key = found.trace.key._replace(caches=())
        return found


def _traced(module: nn.Module, args: Any, kwargs: Any, key: CallKey) -> Trace:
    """A trace of a call: of a small one like it, if the call is large and that says the same."""
    if max(key.sizes, default=0) > _LARGE:
        with suppress(KeptError):
            found = trace(module, *small_call(module, args, kwargs))
            if found.key.facts == key.facts and found.takes(key, module):
                return found
    return trace(module, args, kwargs)


def _reason_of(error: Exception) -> str:
    if isinstance(error, KeptError):
        return error.reason
    text = (str(error).splitlines() or [""])[0]
    return f"could not be read: {type(error).__name__}: {text[:80]}"


def _merge(built: Built) -> None:
    for op in built.sequence.modules():
        if isinstance(op, MergedLinear) and not op.own_forward():
            with torch.inference_mode(False), suppress(ArgumentError):  # of different dtypes
                op.merge_storages()


def check_modes(dataflow: Dataflow, reading: Reading) -> None:
    """Refuses to call a child by itself that the forward calls in another mode.

    Raises:
        KeptError: gradients or autocast were switched around the call.
    """
    called = {op.path for op in operations_in(reading) if isinstance(op, Called)}
    for call in dataflow.calls:
        if call.path in called and call.switched:
            raise KeptError(f"calls '{call.path}' with gradients or autocast switched")


def _is_worth_it(reading: Reading) -> bool:
    """Whether there is anything in it that may be fused, or that has a kernel of its own."""
    found = [op for op in operations_in(reading) if not isinstance(op, _WITH_OTHERS)]
    return len(found) > 1 or any(not isinstance(op, _ALONE) for op in found)


def _check(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses what cannot be read as one sequence, before it is traced."""
    if not any(t.dtype.is_floating_point and t.dim() > 1 for t in tensors_in((args, kwargs))):
        raise KeptError("has no floating-point input of two or more dimensions")
    if not all(p.numel() for p in module.parameters()):
        raise KeptError("has parameters without entries, which hooks of its children may fetch")
    count = sum(1 for _ in module.modules())
    if count > _MODULES_AT_MOST:
        raise KeptError(f"holds {count - 1} modules, which are read by themselves")


def _arrangement(dataflow: Dataflow) -> Any:
    """Where a forward returns outputs and inputs, as :func:`arranged` takes it.

    None if one output is alone.

    Raises:
        KeptError: the result is of a type that cannot be told from its trace.
    """
    inputs, outputs = dataflow.inputs, dataflow.outputs

    def place(tree: Any) -> Any:
        if type(tree) in (tuple, list):
            return type(tree).__name__, *map(place, tree)
        if isinstance(tree, Value):
            is_input = tree in inputs
            return "input" if is_input else "output", (inputs if is_input else outputs).index(tree)
        if isinstance(tree, (LayerIndex, Size)):
            raise KeptError("returns a size, or the number of a layer")
        if not is_scalar(tree):
            raise KeptError(f"returns a {type(tree).__name__}")
        return tree

    return None if isinstance(dataflow.result, Value) else place(dataflow.result)


def arranged(places: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """Outputs, and inputs of a call, where a forward returns them."""
    if not isinstance(places, tuple):
        return places
    kind, *parts = places
    if kind == "output":
        return outputs[parts[0]]
    if kind == "input":
        return inputs[parts[0]]
    parts = [arranged(part, outputs, inputs) for part in parts]
    return parts if kind == "list" else tuple(parts)


def _renumber(built: Built, traced: Reads, reads: Reads) -> None:
    """Has attention extend the layer of this module in a cache, not that of a sibling."""
    if traced is reads or not built.cached:
        return
    pairs = zip(traced.rows, reads.rows)
    numbers = {old[2]: new[2] for old, new in pairs if (id(old[0]), old[1]) in traced.free}
    built.cached[:] = [(op, numbers.get(layer, layer)) for op, layer in built.cached]

"""Calls of a sequence after its parameters, attributes or dtype have changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..basic.identity import Identity
from ..op import OperationContext
from ..sequential import Sequential
from .calls import ERRORS, Outcome, Subject, call
from .changes import NUMBERS, assign, attributes, change_parameters, other, replace_parameters
from .compare import Comparison, cast, failed, loosely
from .steps import first_deviation
from .variants import Variant

Run = Callable[[Sequential], Subject]


@dataclass
class Again:
    """A sequence that has been called, and a copy that is never fused.

    Both are changed in one way after another, and called after each: the results must agree up to
    rounding. A value from before the change would differ in the first digits.

    Attributes:
        seqs: the sequence, in which the changes are not undone, and the copy.
        fused, unfused: how to call either.
        inputs: of the calls, by name.
        floor: the caller's floor.
    """

    seqs: tuple[Sequential, Sequential]
    fused: Run
    unfused: Run
    inputs: Mapping[str, Tensor]
    floor: float | None

    def check(self, where: str) -> None:
        """Applies each change and compares the calls after it."""
        for change, name in (
            (change_parameters, "parameters changed in place between two calls"),
            (replace_parameters, "parameters replaced between two calls"),
        ):
            for seq in self.seqs:
                change(seq)
            self._compare(f"{where}, {name}")
        self._check_numbers(where)
        self._check_flags(where)

    def _check_numbers(self, where: str) -> None:
        """All numbers at once, set between two calls and then again during forward."""
        seq, twin = self.seqs
        before = attributes(twin, NUMBERS)
        accepted = self._accepted(before)
        if not accepted:
            return
        for path, value in accepted.items():
            assign(seq, path, value)
        self._compare(f"{where}, between two calls {_listed(accepted)}")
        back = {path: before[path] for path in accepted}
        ours, theirs = (
            run(Sequential(_Assigns(list(seq), back), *seq))
            for run, seq in zip((self.fused, self.unfused), self.seqs)
        )
        name = f"{where}, during forward {_listed(back)}"
        self._check_one(ours, theirs, call(theirs, self.inputs, Variant()), name)

    def _check_flags(self, where: str) -> None:
        """One flag at a time, as many fusions do not match once it is set."""
        seq, twin = self.seqs
        for path, value in attributes(twin, (bool,)).items():
            expected = self._expected() if assign(twin, path, not value) else None
            if expected is not None:
                assign(seq, path, not value)
                name = f"{where}, between two calls {path} = {not value}"
                self._check_one(self.fused(seq), self.unfused(twin), expected, name)
                assign(seq, path, value)
            assign(twin, path, value)

    def check_dtypes(
        self, where: str, check: Callable[[Sequential, Mapping[str, Tensor], str], None]
    ) -> None:
        """Other dtypes than the caller's: a fusion may fail there, but not be wrong.

        Args:
            check: a further check of the sequence in another dtype, given inputs and text.
        """
        given = self.inputs["input"]
        if torch.is_autocast_enabled(given.device.type):
            return
        dtype = torch.bfloat16 if given.dtype == torch.float32 else torch.float32
        self.inputs = cast(self.inputs, dtype)
        self._compare(f"{where}, input in {dtype} and parameters not", may_fail=True)
        for seq in self.seqs:
            seq.to(dtype)
        where = f"{where}, all in {dtype} between two calls"
        if self._compare(where, may_fail=True):
            check(self.seqs[0], self.inputs, where)

    def _accepted(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sets attributes of the twin to other values with which it still runs; returns these."""
        twin = self.seqs[1]
        out = {path: other(v) for path, v in values.items() if assign(twin, path, other(v))}
        if self._expected() is not None:
            return out
        for path in out:
            assign(twin, path, values[path])
        for path, value in list(out.items()):
            assign(twin, path, value)
            if self._expected() is None:
                assign(twin, path, values[path])
                del out[path]
        return out

    def _expected(self) -> Outcome | None:
        """The outcome of the twin; None if it fails or its results are not finite."""
        twin, inputs = self.seqs[1], self.inputs
        try:
            if _may_assert(inputs):
                on_cpu = {name: t.cpu() for name, t in inputs.items()}
                call(self.unfused(copy.deepcopy(twin).cpu()), on_cpu, Variant())
            outcome = call(self.unfused(twin), inputs, Variant())
        except ERRORS:
            return None
        made = (*outcome.outputs.values(), *outcome.grads.values())
        numbers = all(bool(t.isfinite().all()) for t in made if t is not None)
        return outcome if numbers else None

    def _compare(self, where: str, *, may_fail: bool = False) -> bool:
        expected = self._expected()
        if expected is None:
            return False
        fused, unfused = self.fused(self.seqs[0]), self.unfused(self.seqs[1])
        return self._check_one(fused, unfused, expected, where, may_fail=may_fail)

    def _check_one(
        self,
        subject: Subject,
        peer: Subject,
        expected: Outcome,
        where: str,
        *,
        may_fail: bool = False,
    ) -> bool:
        """Whether the call succeeded; it may fail if ``may_fail``, but not be wrong."""
        try:
            ours = call(subject, self.inputs, Variant())
        except ERRORS as error:
            if may_fail:
                return False
            raise AssertionError(failed(where, error)) from error
        own = self.seqs[1].parameters()
        tolerance = loosely(self.floor, [*self.inputs.values(), *own])
        autocast = torch.is_autocast_enabled(self.inputs["input"].device.type)

        def step() -> str:
            calls = [self.inputs] * 3
            grads = ours.grad_outputs
            return first_deviation(subject, peer, peer, calls, Variant(), tolerance, grads)

        Comparison(where, ours, expected, expected, tolerance, "unfused", autocast, step).check()
        return True


def _may_assert(inputs: Mapping[str, Tensor]) -> bool:
    """Whether a device-side assertion may refuse a value, after which no kernel runs any more.

    An index out of range fails one on a GPU, where a CPU raises an exception.
    """
    return any(t.is_cuda and not t.is_floating_point() for t in inputs.values())


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {value}" for path, value in values.items())


class _Assigns(Identity):
    """Sets attributes of the operations after it during forward.

    No other plan is made then, so that a fused operation has to read them at every call.

    Args:
        ops: those operations.
        values: by path, which begins with the index of one of them.
    """

    def __init__(self, ops: Sequence[nn.Module], values: Mapping[str, Any]) -> None:
        super().__init__()
        self._ops, self._values = list(ops), dict(values)

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        for path, value in self._values.items():
            first, _, rest = path.partition(".")
            assign(self._ops[int(first)], rest, value)
        return super().op_forward(ctx, input_, **kwargs)

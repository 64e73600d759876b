"""Modules in which one operation more is computed than in others."""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opfuser.reading.construction import build
from opfuser.reading.grammar import read
from opfuser.reading.kept import KeptError
from opfuser.reading.stand_ins import is_cache
from opfuser.reading.tracer import trace

from .recomputed import Example, assert_equal_steps, called_in

MUTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda t: t.clamp(-0.5, 0.5),
    "product": lambda t: t * 1.5,
    "sum": lambda t: t + 0.25,
    "ReLU": lambda t: t.relu(),
    "flip": lambda t: t.flip(-1),
    "roll": lambda t: t.roll(1, -1),
    "other rows": lambda t: t.flip(0),
    "square": lambda t: t * t,
    "copy": lambda t: t.clone(),
    "rounding": lambda t: t.bfloat16().to(t.dtype),
    "no gradient": lambda t: t.detach(),
    "mean": lambda t: t - t.mean(-1, keepdim=True),
    "transposition": lambda t: t.mT.contiguous().view(t.shape) if t.dim() > 1 else t,
}


class _Mutating(TorchFunctionMode):
    """Computes one operation more behind one call of a function of torch."""

    def __init__(self, number: int, mutation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.number, self.mutation, self.count = number, mutation, 0

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # A trace alone makes stand-ins of parametrized weights; of a cache it knows the result.
        if function is torch.empty_strided or _is_in_a_cache(inspect.currentframe()):
            return result
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(first, Tensor) or not (first.is_floating_point() and first.dim()):
            return result
        self.count += 1
        if self.count - 1 != self.number:
            return result
        mutated = self.mutation(first)
        return mutated if first is result else (mutated, *result[1:])


def _is_in_a_cache(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "update" and is_cache(frame.f_locals.get("self")):
            return True
        frame = frame.f_back
    return False


class Mutant(nn.Module):
    """A module that computes one operation more behind call ``number`` of a function of torch."""

    def __init__(self, inner: nn.Module, number: int, mutation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.number, self.mutation = inner, number, mutation
        self.train(inner.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Mutating(self.number, self.mutation):
            return self.inner.forward(*args, **kwargs)


def count_of(example: Example) -> int:
    """The number of calls behind which a module can be mutated."""
    example = example.again()
    with torch.no_grad(), _Mutating(-1, MUTATIONS["copy"]) as mode:
        example.module(*example.args, **example.kwargs)
    return mode.count


def mutants_of(example: Example, shift: int = 0) -> list[tuple[int, str]]:
    """The calls behind which a module can be mutated, each with one of the mutations in turn."""
    names = list(MUTATIONS)
    return [(n, names[(n + shift) % len(names)]) for n in range(count_of(example))]


def outcomes_of(example: Example, *shifts: int) -> Counter[str]:
    """How all mutants are read, as often as there are shifts.

    Raises:
        AssertionError: something else was read than one computes.
    """
    return Counter(outcome_of(example, *m) for s in shifts or (0,) for m in mutants_of(example, s))


def outcome_of(example: Example, number: int, name: str) -> str:
    """How a mutant is read: the reason why it is kept, "called", or "recomputed".

    Raises:
        AssertionError: something else was read than it computes.
    """
    mutant = Mutant(example.module, number, MUTATIONS[name])
    changed = example._replace(module=mutant)
    try:
        flow = trace(*changed).dataflow
        reading = read(flow)
        built = build(reading, mutant)
    except KeptError as kept:
        return kept.reason
    called = called_in(reading)
    # A loop over experts has more turns in a trace than in a call, so that others are mutated.
    loops = any(v.counted for node in flow.nodes for v in node.results)
    if called and (loops or _is_inside(mutant, changed, called)):
        return "called"
    assert_equal_steps(changed, built)
    return "recomputed"


def _is_inside(mutant: Mutant, example: Example, paths: list[str]) -> bool:
    """Whether a mutant is mutated in one of its children, which does not compute that alone."""
    found, depth = [], []

    def mutation(t: Tensor) -> Tensor:
        found.extend(depth)
        return t

    def enter(*_: Any) -> None:
        depth.append(True)

    def leave(*_: Any) -> None:
        depth.pop()

    children = [mutant.get_submodule(path) for path in paths]
    handles = [child.register_forward_pre_hook(enter) for child in children]
    handles += [child.register_forward_hook(leave) for child in children]
    before, mutant.mutation = mutant.mutation, mutation
    try:
        with torch.no_grad():
            given = example.again()
            mutant(*given.args, **given.kwargs)
    finally:
        mutant.mutation = before
        for handle in handles:
            handle.remove()
    return bool(found)

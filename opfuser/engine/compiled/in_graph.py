"""A program as one function that torch.compile puts into its graph without looking inside.

Dynamo, which interprets Python, guards every value that it reads. The execution of a plan reads
thousands, and each call of the compiled code would check them all again: on a CPU, with torch 2.13,
for 2.9 instead of 0.6 ms with 12 layers of GPT-2. What it does not look inside runs as ordinary
Python while AOTAutograd traces the tensors; the stamps and facts by which the program was found
are guards enough.

Of sequences with equal keys, such as the layers of a model that are compiled one by one, the first
one's function computes all: it reads no parameter but its arguments.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.op_base import BasicOperation
from ...core.op_base.kinds import is_built_in
from ...core.traced_calls import Functions
from ...torch_internals import compiling
from ..program import Program
from .traced import execute

Places = Sequence[tuple[dict[str, nn.Parameter | None], str]]


Owners = weakref.WeakKeyDictionary[Any, Callable[[], tuple[Program, Places]]]


class _Shared(NamedTuple):
    """A function, and what every living sequence that was traced with it executes in it."""

    name: str
    function: Callable[..., Any]
    owners: Owners


functions = Functions()
_shared: dict[Hashable, _Shared] = {}
_count = itertools.count()


def fits(program: Program, parameters: Iterable[Tensor | None]) -> bool:
    """Whether a call reads nothing but its tensors, and what the stamps describe.

    A user's operation may read and change state; buffers, and ``main_grad`` of a parameter, are not
    among the tensors; Dynamo replaces collectives by functional ones.
    """
    if not all(type(p) in (nn.Parameter, Tensor, type(None)) for p in parameters):
        return False
    plan = program.plan
    steps = [step.op for step in (*plan.forward, *plan.backward)]
    return all(map(is_built_in, steps)) and all(map(_is_functional, plan.basic_ops))


def _is_functional(op: BasicOperation) -> bool:
    state = op.__dict__
    return (
        is_built_in(op)
        and not state.get("_state_names")
        and all(buffer is None for module in op.modules() for buffer in module._buffers.values())
        and not state.get("accumulate_into_main_grad")
        and not op.communicates
    )


def name_of(key: Hashable, owner: object, find: Callable[[], tuple[Program, Places]]) -> str:
    """The name in ``functions`` of the one for a key, which is made unless there is one.

    It goes from input, parameters and extra inputs to the results of a program that :func:`fits`.

    Args:
        key: of the program, with all that it follows from but the values of parameters.
        owner: of the program. The function goes with the last one, as they hold parameters.
        find: returns the program, and the dictionaries and names in which its operations find
            their parameters. It must not hold the owner.
    """
    shared = _shared.get(key)
    if shared is None:
        owners: Owners = weakref.WeakKeyDictionary()
        shared = _Shared(f"sequence_{next(_count)}", _function(owners), owners)
    if shared.owners.pop(owner, None) is None:
        weakref.finalize(owner, _forget, key).atexit = False
    shared.owners[owner] = find  # the last one
    _shared[key] = shared  # again, if the last owner has gone just now
    setattr(functions, shared.name, shared.function)
    return shared.name


def _forget(key: Hashable) -> None:
    shared = _shared.get(key)
    if shared is not None and not any(True for _ in shared.owners):
        del _shared[key]
        delattr(functions, shared.name)


def _function(owners: Owners) -> Callable[..., Any]:
    def opfuser_sequence(input_: Tensor, *tensors: Tensor) -> Any:
        *_, latest = owners.values()  # of the sequence that is being traced
        program, places = latest()
        count = program.num_parameters
        with compiling(), _placed(places, tensors):
            return execute(program, input_, tensors[:count], tensors[count:], None)

    torch.compiler.allow_in_graph(opfuser_sequence)
    return opfuser_sequence


@contextmanager
def _placed(places: Places, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Operations find the traced parameters where those of the model are, as functional_call does.

    What is written straight into ``_parameters`` does not count as a change of the module.
    """
    before = [parameters[name] for parameters, name in places]
    try:
        for (parameters, name), tensor in zip(places, tensors):
            parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for (parameters, name), own in zip(places, before):
            parameters[name] = own

"""Guards: expressions that say whether a call has the facts for which a plan was found."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..core.context import TensorFacts, any_autocast, autocast_dtype
from ..recipe import Recipe
from .plan_key import CallFacts

T = TypeVar("T")

Guard: TypeAlias = Callable[
    [Tensor | TensorFacts, Sequence[Tensor], Sequence[Tensor | TensorFacts], Recipe | None], bool
]
"""Has the arguments of ``call_facts``, and says whether its result would be the same again."""

# Calls alternate between few facts: training and evaluation, with autocast and without.
MAX_RECENT = 4


class Recent(Generic[T]):
    """What the latest calls found, the last one first: version of the registry, guard, and result.

    A change of the operations replaces the whole object. So a call on another thread, which began
    before the change, adds what it found to an object that no later call reads.
    """

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: tuple[tuple[int, Guard, T], ...] = ()

    def put_first(self, entry: tuple[int, Guard, T]) -> None:
        """Adds or moves ``entry``; drops other versions, and what was not used for longest."""
        version = entry[0]
        others = [other for other in self.found if other is not entry and other[0] == version]
        self.found = (entry, *others[: MAX_RECENT - 1])


class Expression(NamedTuple):
    """The text of a guard, and what its names stand for."""

    text: str
    names: dict[str, Any]


def expression(facts: CallFacts) -> Expression:
    """The guard of ``facts`` as text: true for exactly the calls whose ``call_facts`` equal them.

    The text is of fixed names, attributes and counts. Whatever comes from a call is a constant,
    named by its number. What most often tells calls apart stands first, the shapes, which take
    longest to read, last.
    """
    numbers: dict[Hashable, int] = {}

    def constant(value: Hashable) -> str:
        return f"c{numbers.setdefault(value, len(numbers))}"

    def flag(tensor: str, required: bool) -> str:
        return f"{tensor}.requires_grad" if required else f"not {tensor}.requires_grad"

    grad, device = facts.grad_enabled, constant(facts.device)
    parameters = [f"parameters[{n}]" for n in range(len(facts.parameter_dtypes))]
    extras = [f"extra_inputs[{n}]" for n in range(len(facts.extra_inputs))]
    terms = ["is_grad_enabled()" if grad else "not is_grad_enabled()"]
    if facts.recipe is None:
        terms.append("recipe is None")
    else:
        recipe = constant(facts.recipe)
        terms.append(f"(recipe is {recipe} or recipe == {recipe})")
    terms.append(f"x.dtype is {constant(facts.dtype)}")
    if grad:
        terms.append(flag("x", facts.requires_grad))
    terms.append(f"x.device == {device}")
    if facts.autocast_dtype is None:
        terms.append(f"(not any_autocast() or autocast_dtype({device}) is None)")
    else:
        terms.append(f"autocast_dtype({device}) is {constant(facts.autocast_dtype)}")
    terms.append(f"len(parameters) == {len(parameters)}")
    terms.append(f"len(extra_inputs) == {len(extras)}" if extras else "not extra_inputs")
    for tensor, (dtype, required) in zip(extras, facts.extra_inputs):
        terms.append(f"{tensor}.dtype is {constant(dtype)}")
        if grad:
            terms.append(flag(tensor, required))
    terms += map(flag, parameters, facts.parameters_require_grad or ())
    terms += [f"{p}.dtype is {constant(d)}" for p, d in zip(parameters, facts.parameter_dtypes)]
    terms += [f"{p}.shape == {constant(s)}" for p, s in zip(parameters, facts.parameter_shapes)]
    names: dict[str, Any] = {
        "__builtins__": {},
        "len": len,
        "is_grad_enabled": torch.is_grad_enabled,
        "any_autocast": any_autocast,
        "autocast_dtype": autocast_dtype,
        **{f"c{n}": value for value, n in numbers.items()},
    }
    text = "lambda x, parameters, extra_inputs, recipe: " + " and ".join(terms)
    return Expression(text, names)


# Compiling takes longer than all else that a call with other facts does, and layers are alike. No
# lru_cache, which Dynamo warns of where it sees a call that was left to eager mode.
_guards: dict[CallFacts, Guard] = {}
_MAX_GUARDS = 256


def guard_of(facts: CallFacts) -> Guard:
    """The guard of ``facts``."""
    guard = _guards.get(facts)
    if guard is None:
        if len(_guards) >= _MAX_GUARDS:
            _guards.clear()
        guard = _guards[facts] = _compiled(facts)
    return guard


def _compiled(facts: CallFacts) -> Guard:
    text, names = expression(facts)
    guard: Guard = eval(text, names)
    return guard

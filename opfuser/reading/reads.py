"""What a forward has read besides tensors, and whether it would read the same again."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

MISSING = object()
SLOTS = "_parameters", "_buffers", "_modules"
HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# Without `operator.attrgetter`, which takes three times as long.
CELL: Callable[[CellType], Any] = CellType.cell_contents.__get__
CODE: Callable[[FunctionType], Any] = FunctionType.__code__.__get__  # type: ignore[attr-defined]
COUNT: Callable[[dict[Any, Any]], int] = dict.__len__
DEFAULTS: Callable[[FunctionType], Any] = vars(FunctionType)["__defaults__"].__get__
KEYWORD_DEFAULTS: Callable[[FunctionType], Any] = vars(FunctionType)["__kwdefaults__"].__get__
DTYPE: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]
REQUIRES_GRAD: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
SHAPE: Callable[[Tensor], torch.Size] = Tensor.shape.__get__  # type: ignore[attr-defined]
OF_PARAMETERS = DTYPE, REQUIRES_GRAD, SHAPE

# A dict, a key of it, and what was there.
Row = tuple[dict[str, Any], str, Any]


def is_scalar(value: Any) -> bool:
    """Whether a value is compared by equality; all others are compared by identity."""
    return isinstance(value, _SCALARS)


def is_of_python(name: str) -> bool:
    """Whether a module is of Python's library or of torch."""
    top = name.partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


def is_hooked(module: nn.Module, ignored: Callable[[Any], bool] = lambda hook: False) -> bool:
    """Whether a module has hooks other than the ignored ones."""
    own = object.__getattribute__(module, "__dict__")
    return any(not ignored(hook) for name in HOOKS for hook in own[name].values())


def contents(container: Any) -> list[Any]:
    """The keys and values of a container, or of the attributes of an object."""
    if isinstance(container, (list, tuple)):
        return list(container)
    if isinstance(container, (set, frozenset)):
        return sorted(container, key=id)
    if isinstance(container, dict):
        kind = ordered_by(container)
        return [*kind.keys(container), *kind.values(container)]
    return [*vars(container), *vars(container).values()]


def ordered_by(mapping: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The type whose methods tell what a dict holds, and in which order."""
    return OrderedDict if isinstance(mapping, OrderedDict) else dict


def held_tensors(module: nn.Module) -> tuple[list[Any], list[Tensor | None]]:
    """Facts of a module's parameters and buffers, with the number of the first equal one; these."""
    numbers: dict[int, int] = {}
    facts: list[Any] = []
    tensors: list[Tensor | None] = []
    for path, m in module.named_modules(remove_duplicate=False):
        for slot in (m._parameters, m._buffers):
            for name, t in slot.items():
                own = None
                if t is not None:
                    number = numbers.setdefault(id(t), len(numbers))
                    own = type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, number
                facts.append((path, name, own))
                tensors.append(t)
    return facts, tensors


def unchanged(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists have the same objects, or equal scalars, in the same order."""
    return len(now) == len(before) and all(map(same, now, before))


def same(a: Any, b: Any) -> bool:
    """Whether two values are one object, or scalars that nothing tells apart."""
    if a is b:
        return True
    # 0.0 and -0.0 are equal, 1 and True are of two types.
    return is_scalar(a) and type(a) is type(b) and a == b and (bool(a) or repr(a) == repr(b))


@dataclass(eq=False, repr=False)
class Reads:
    """What the forward of a module has read.

    Attributes:
        module: whose forward it was.
        rows: entries of dicts, of which scalars are compared by equality, others by identity.
        kinds: types, names of attributes that were found on them, and the values of these.
        facts: for each function, such as ``len``, what it was asked about and what it answered.
        containers: containers and objects whose contents were read, and the contents.
        held: facts of all parameters and buffers that the module held, and these.
        free: rows, by holder's id and name, in which siblings may differ.
    """

    module: nn.Module
    rows: list[Row]
    kinds: list[tuple[type, str, Any]]
    facts: dict[Callable[[Any], Any], tuple[list[Any], list[Any]]]
    containers: list[tuple[Any, list[Any]]]
    held: tuple[list[Any], list[Tensor | None]]
    free: frozenset[tuple[int, str]]

    @functools.cached_property
    def current(self) -> Callable[[], bool]:
        """Whether the forward would read the same now."""
        return self._check(self.rows, self.facts)

    @functools.cached_property
    def current_but_parameters(self) -> Callable[[], bool]:
        """Whether it would, if it found the same parameters."""
        rows = [row for row in self.rows if not isinstance(row[2], nn.Parameter)]
        facts = {get: asked for get, asked in self.facts.items() if get not in OF_PARAMETERS}
        return self._check(rows, facts)

    def _check(self, rows: list[Row], facts: dict[Any, Any]) -> Callable[[], bool]:
        """A function that is written for what it compares, in half the time of a loop over it."""
        values: dict[int, tuple[str, Any]] = {}

        def name(value: Any) -> str:
            return values.setdefault(id(value), (f"v{len(values)}", value))[0]

        conditions = [_row(name, *row) for row in rows]
        conditions += [_attribute(name, *kind) for kind in self.kinds]
        conditions += [_answers(name, get, *asked) for get, asked in facts.items() if asked[0]]
        if self.containers:
            inside = name(self.containers)
            conditions.append(f"all(unchanged(contents(c), old) for c, old in {inside})")
        text = "\n".join(
            (
                f"def make({', '.join(own for own, _ in values.values())}):",
                "    def check():",
                "        try:",
                f"            return {' and '.join(conditions) or 'True'}",
                # What is not there, and values such as arrays that cannot be compared.
                "        except (AttributeError, KeyError, RuntimeError, ValueError):",
                "            return False",
                "    return check",
            )
        )
        if text not in _written:  # siblings share it
            # Texts of this module, and names of attributes as literals.
            space: dict[str, Any] = {"MISSING": MISSING, "is_": is_, "same": same}
            space |= {"contents": contents, "unchanged": unchanged}
            exec(text, space)
            _written[text] = space["make"]
        return _written[text](*(value for _, value in values.values()))


_written: dict[str, Callable[..., Callable[[], bool]]] = {}
_Name = Callable[[Any], str]


def _row(name: _Name, holder: dict[str, Any], key: str, value: Any) -> str:
    if value is MISSING:
        return f"{key!r} not in {name(holder)}"
    if value is None or type(value) is bool:
        return f"{name(holder)}[{key!r}] is {value}"
    return _same_as(name, f"{name(holder)}[{key!r}]", value, "is")


def _attribute(name: _Name, kind: type, attribute: str, value: Any) -> str:
    found = f"{name(kind)}.{attribute}"
    if value is MISSING or not attribute.isidentifier():
        found = f"getattr({name(kind)}, {attribute!r}, MISSING)"
    compared = "is" if isinstance(value, FunctionType | property) or value is MISSING else "=="
    return _same_as(name, found, value, compared)


def _same_as(name: _Name, found: str, value: Any, compared: str) -> str:
    """Text that tests whether what was found is a value; most scalars are the same object."""
    if is_scalar(value):
        return f"((v := {found}) is {name(value)} or same(v, {name(value)}))"
    return f"{found} {compared} {name(value)}"


# What takes less time one by one than by a function of C that goes over lists.
_SINGLE = {
    type: "type({}) is {}",
    DTYPE: "{}.dtype is {}",
    REQUIRES_GRAD: "{}.requires_grad is {}",
    SHAPE: "{}.shape == {}",
    CODE: "{}.__code__ is {}",
}


def _answers(name: _Name, get: Callable[[Any], Any], about: list[Any], answers: list[Any]) -> str:
    if get in _SINGLE:
        return " and ".join(map(_SINGLE[get].format, map(name, about), map(name, answers)))
    if get is COUNT and not any(answers):
        return f"not any({name(about)})"
    found = f"map({name(get)}, {name(about)})"
    if getattr(get, "__name__", "") == "isdisjoint" and all(answers):  # of few attributes or none
        return f"(not any({name(about)}) or all({found}))"
    if get is CELL:  # whose contents may be tensors
        return f"all(map(is_, {found}, {name(answers)}))"
    return f"[*{found}] == {name(answers)}"

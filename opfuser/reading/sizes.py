"""Sizes of inputs in a traced forward, and what the forward decided by them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Sizes:
    """The sizes of one traced call that other calls may have differently.

    Args:
        values: of the sizes that may differ, in order of their first occurrence in the inputs.
        constants: sizes that are the same in all calls, such as those of parameters.
    """

    def __init__(self, values: Iterable[int], constants: Iterable[int]) -> None:
        self.values = tuple(values)
        self.constants = {0, 1, *constants}
        self._number = {value: number for number, value in enumerate(self.values)}
        self._derived: set[int] = set()
        self._guards: dict[str, None] = {}

    def of(self, size: int, of_input: bool = False) -> Any:
        """A size of a tensor in the traced forward; of one that may differ, a :class:`Size`."""
        if size not in self._number:
            return size if size in self.constants else Size(size, "", self)
        known = of_input or size not in self._derived
        return Size(size, f"s[{self._number[size]}]" if known else "", self)

    def shape(self, shape: Iterable[int], of_input: bool = False) -> torch.Size:
        """The sizes of a tensor, which is an input of the forward or is computed in it."""
        return torch.Size([self.of(size, of_input) for size in shape])

    def add(self, size: int) -> None:
        """Adds a size that may differ and is known after the others, such as that of a cache."""
        name = f"s[{len(self.values)}]"
        if size in self._number or size <= 1:
            self.note(f"{name} == {_text(self.of(size, of_input=True))}", True)
        else:
            self._number[size] = len(self.values)
        self.values += (size,)

    def derive(self, size: int) -> None:
        """Notes that a function has made a size from others that may be equal to one by chance."""
        if size in self._number:
            self._derived.add(size)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """The time of a function that computes the same for any sizes: nothing is noted of it."""
        noted = self.constants, self._derived, self._guards
        self.constants, self._derived, self._guards = (
            set(self.constants),
            set(self._derived),
            dict(self._guards),
        )
        yield
        self.constants, self._derived, self._guards = noted

    def varying(self, shape: Iterable[int]) -> list[int]:
        """The sizes in a shape that may differ, in order of their values."""
        return sorted(size for size in shape if size in self._number)

    def known(self, shape: Iterable[int]) -> bool:
        """Whether each size of a shape is a constant or may differ in a way that is known."""
        return all(n in self.constants or self._is_known(n) for n in shape)

    def _is_known(self, size: int) -> bool:
        return size in self._number and size not in self._derived

    def note(self, text: str, outcome: bool) -> None:
        """Notes the outcome of a comparison; one of a size that is not known fixes all."""
        if text:
            self._guards[text if outcome else f"not ({text})"] = None
        else:
            self.fix_all()

    def fix(self, size: Any) -> None:
        """Notes that the trace holds for calls alone in which this size is the same."""
        if isinstance(size, Size):
            self.note(size.text and f"{size.text} == {plain(size)}", True)
        elif size in self._number:
            self.note(f"s[{self._number[size]}] == {size}", True)

    def fix_all(self) -> None:
        """Notes that the trace holds for calls alone in which all sizes are the same."""
        for size in self.values:
            self.fix(size)

    @property
    def guards(self) -> tuple[str, ...]:
        """The conditions on the sizes ``s`` of a call, as expressions of Python."""
        return tuple(self._guards)


@functools.cache
def function_of(text: str) -> Callable[[tuple[int, ...]], Any]:
    """A function of the sizes ``s`` of a call that returns what an expression of them is."""
    # Of names, operators and integers that this file has written: nothing of a caller's.
    return eval(f"lambda s: {text}")  # type: ignore[no-any-return]


def plain(leaf: Any) -> Any:
    """The integer of a size; other leaves are returned as they are."""
    return leaf.value if isinstance(leaf, Size) else leaf


class _Kind(type(torch.SymInt)):  # type: ignore[misc]
    """The type of a size, which is equal to that of integers."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is int

    def __hash__(cls) -> int:
        return hash(int)


class Size(torch.SymInt, metaclass=_Kind):
    """A size that may differ between calls; it notes what a forward decides by it.

    No subclass of ``int``, which the interpreter and others in C read without a word: they ask this
    for an index, which fixes it. Functions of torch take it for an integer that is not known yet.

    Attributes:
        value: in the traced call.
        text: an expression of the sizes ``s`` of a call; empty if none is known.
        sizes: of the call.
    """

    def __init__(self, value: int, text: str, sizes: Sizes) -> None:
        self.value, self.text, self.sizes = value, text, sizes

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    @property  # torch declares an attribute since 2.15
    def node(self) -> Any:  # type: ignore[override, unused-ignore]
        raise TypeError("a size is no argument of this function")

    __hash__: Callable[[], int]


def _text(value: Any) -> str:
    return value.text if isinstance(value, Size) else str(int(value))


def _arithmetic(symbol: str, function: Callable[[Any, Any], Any], reflected: bool) -> Any:
    def method(self: Size, other: Any) -> Any:
        if not isinstance(other, (int, float, complex, list, tuple, str)):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        if not symbol or not isinstance(other, int):  # what comes out no longer tells
            for size in (self, other):
                self.sizes.fix(size)
            return function(plain(left), plain(right))
        known = _text(left) and _text(right)
        text = f"({_text(left)} {symbol} {_text(right)})" if known else ""
        return Size(function(plain(left), plain(right)), text, self.sizes)

    return method


def _comparison(symbol: str, function: Callable[[Any, Any], bool]) -> Any:
    def method(self: Size, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        outcome = function(self.value, plain(other))
        if isinstance(other, Size) and self.text == other.text != "":
            return outcome
        right = _text(other) if isinstance(other, int) else repr(other)
        finite = isinstance(other, int) or math.isfinite(other)
        text = f"{self.text} {symbol} {right}" if self.text and right and finite else ""
        self.sizes.note(text, outcome)
        return outcome

    return method


def _fixing(function: Callable[..., Any]) -> Any:
    """A method or attribute of integers, of which sizes are the same in all calls."""

    def method(self: Size, *others: Any) -> Any:
        for size in (self, *others):
            self.sizes.fix(size)
        return function(self.value, *map(plain, others))

    return method


_OF_OBJECTS = frozenset("__new__ __init__ __class__ __getattribute__ __doc__".split())
for _name in set(dir(int)) - _OF_OBJECTS:
    _of_int = getattr(int, _name)
    if not callable(_of_int):
        setattr(Size, _name, property(_fixing(_of_int.__get__)))
    elif getattr(object, _name, None) is not _of_int:
        setattr(Size, _name, _fixing(_of_int))
Size.__reduce_ex__ = _fixing(lambda value, protocol: (int, (value,)))  # type: ignore[method-assign]
for _name, _symbol, _function in (
    ("add", "+", operator.add),
    ("sub", "-", operator.sub),
    ("mul", "*", operator.mul),
    ("floordiv", "//", operator.floordiv),
    ("mod", "%", operator.mod),
    ("and", "", operator.and_),
    ("divmod", "", divmod),
    ("lshift", "", operator.lshift),
    ("or", "", operator.or_),
    ("pow", "", operator.pow),
    ("rshift", "", operator.rshift),
    ("truediv", "", operator.truediv),
    ("xor", "", operator.xor),
):
    setattr(Size, f"__{_name}__", _arithmetic(_symbol, _function, False))
    setattr(Size, f"__r{_name}__", _arithmetic(_symbol, _function, True))
for _name, _symbol, _compare in (
    ("eq", "==", operator.eq),
    ("ne", "!=", operator.ne),
    ("lt", "<", operator.lt),
    ("le", "<=", operator.le),
    ("gt", ">", operator.gt),
    ("ge", ">=", operator.ge),
):
    setattr(Size, f"__{_name}__", _comparison(_symbol, _compare))

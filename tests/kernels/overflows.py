"""Finds 32-bit integers of a kernel that overflow on the way to an address, a mask or a loop.

A launch is compiled for a GPU that is not there, as far as Triton's own intermediate code (TTIR),
and its integers are followed as intervals: from the arguments of the launch, and from the number of
its programs. What depends on memory, or comes from one turn of a loop to the next, is unknown, and
not judged.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from opfuser.kernels.launch import Recorded
from tests.kernels.compiling import signature

Interval = tuple[int, int]  # the least and the largest that an integer may be
_NAME = r"%[\w.$-]+(?:#\d+)?"
# Results that are what one operand is.
_SAME = ("splat", "broadcast", "expand_dims", "reshape", "trans", "extsi")
# Those that are largest and least at ends of the operands' intervals.
_MONOTONE = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "shli": operator.lshift,
    "shrsi": operator.rshift,
    "shrui": operator.rshift,
    "maxsi": max,
    "minsi": min,
    "divsi": lambda a, b: abs(a) // b * (1 if a >= 0 else -1),
}
# The least second operand that they are followed for.
_LEAST = {"shli": 0, "shrsi": 0, "shrui": 0, "divsi": 1, "remsi": 1}
_ACCESSES = ("addptr", "load", "store", "atomic_rmw", "atomic_cas")


class _Reached(Exception):  # noqa: N818  # no error
    """The code before it becomes that of a GPU."""


class Value:
    """A line of the code, what it computes from, and what its result may be, if that is known."""

    def __init__(self, line: str, operands: Sequence[Value] = (), known: Interval | None = None):
        self.line = line
        self.operands = list(operands)
        self.known = known
        found = re.search(r"[ <x]i(\d+)>?$", line)
        # Of the integers that it is. A comparison states the type of what it compares.
        self.bits = 1 if "arith.cmp" in line else int(found[1]) if found else 0

    @property
    def overflows(self) -> bool:
        return self.bits == 32 and self.known is not None and not _fits(self.known)


def overflows(noted: Recorded) -> list[str]:
    """Lines by which a launch may compute a wrong address, a wrong mask or the wrong loops."""
    seen: set[int] = set()
    found: list[str] = []
    left = _Code(noted).roots
    while left:
        value = left.pop()
        if id(value) not in seen:
            seen.add(id(value))
            left += value.operands
            if value.overflows:
                found.append(f"{noted.launch.name}: {value.line} may be {value.known}")
    return found


def code_of(noted: Recorded) -> str:
    """The code of a launch, with the functions that it calls in their places."""

    def reach(module: Any, *_: Any) -> Any:
        raise _Reached(str(module))

    types, constants, attributes = signature(noted)
    source = ASTSource(noted.launch.function, types, constants, attributes)
    with mock.patch.object(CUDABackend, "make_ttgir", staticmethod(reach)):
        try:
            kernel = triton.compile(source, GPUTarget("cuda", 90, 32), noted.launch.options)
        except _Reached as reached:
            return str(reached)
    return kernel.asm["ttir"]  # from Triton's cache


class _Code:
    """Reads the code of a launch.

    Attributes:
        roots: what addresses, masks, loops and branches are made of.
    """

    def __init__(self, noted: Recorded) -> None:
        self.roots: list[Value] = []
        self._scope: dict[str, Value] = {}
        self._grid = noted.grid
        names = noted.launch.function.arg_names[len(noted.tensors) :]
        self._arguments = dict(zip(names, noted.ints))
        text = re.sub(r" loc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)", "", code_of(noted))
        self._read(line.strip() for line in text.splitlines() if line[:1] != "#")
        assert self.roots, noted.launch.name

    def _read(self, lines: Iterator[str]) -> list[list[Value]]:
        """The lines of a region; returns what its branches yield."""
        yielded: list[list[Value]] = []
        for line in lines:
            name, text = line.split(" = ", 1) if line[:1] == "%" else ("", line)
            found = re.match(r"\"?(?:\w+\.)*(\w+)", text)
            what = found[1] if found else ""
            if what == "func" or line[:1] == "^":
                self._enter(line)
            elif line[:1] == "}":
                if line[-1] != "{":  # where another branch begins
                    return yielded
            elif what == "yield":
                yielded.append(self._named(text))
            elif line[-1:] == "{":
                self._region(name, what, text, lines)
            else:
                self._statement(name, what, text, line)
        return yielded

    def _named(self, text: str) -> list[Value]:
        return [self._scope[name] for name in re.findall(_NAME, text)]

    def _enter(self, line: str) -> None:
        for name, kind in re.findall(r"(%\w+): (\S+?)[ ,)]", line):
            number = self._arguments.get(name[1:])
            known = None if number is None else (number, number)
            self._scope[name] = Value(f"{name}: {kind}", (), known)

    def _statement(self, name: str, what: str, text: str, line: str) -> None:
        operands = self._named(text)
        known = self._known(what, text, [v.known for v in operands])
        if what in _ACCESSES:  # of which masks matter, and offsets, but not what is stored
            self.roots += [v for v in operands if v.bits == 1 or what == "addptr"]
            operands = []
        for one in filter(None, name.split(", ")):  # a split has two
            self._scope[one] = Value(line, operands, known)

    def _region(self, name: str, what: str, text: str, lines: Iterator[str]) -> None:
        carried: list[Value] = []
        if what == "for":
            carried = self._loop(text)
        elif what == "if":
            self.roots += self._named(text)
        yielded = self._read(lines)
        for value, new in zip(carried, yielded[0] if carried else ()):
            value.operands.append(new)
        name, _, many = name.partition(":")
        results = list(zip(*yielded)) if what in ("for", "if") else [()]
        for n, values in enumerate(results if name else ()):
            known = _hull([v.known for v in values]) if what == "if" else None
            self._scope[f"{name}#{n}" if many else name] = Value(text, values, known)

    def _loop(self, text: str) -> list[Value]:
        """Enters what a loop counts, and what it carries from turn to turn, which it returns."""
        head, _, rest = text.partition("iter_args(")
        index, *bounds = re.findall(_NAME, head)
        begin, end, step = (self._scope[bound] for bound in bounds)
        counted = Value(text, (begin, end, step))
        if begin.known and end.known and step.known:
            counted.known = begin.known[0], max(begin.known[0], end.known[1] - 1)
            after = counted.known[1] + step.known[1]
            self.roots.append(Value(f"{head} : i{begin.bits}", (), (after, after)))
        self._scope[index] = counted
        self.roots += begin, end, step
        carried = []
        for inner, first in re.findall(rf"({_NAME}) = ({_NAME})", rest):
            self._scope[inner] = Value(text, [self._scope[first]])
            carried.append(self._scope[inner])
        return carried

    def _known(self, what: str, text: str, given: list[Interval | None]) -> Interval | None:
        """What the result of an operation may be."""
        if what == "constant":
            number = re.search(r"(?:dense<|constant )(-?\d+)>? :", text)
            return (int(number[1]), int(number[1])) if number else None
        if what == "make_range":
            end, start = re.findall(r"(?:end|start) = (\d+)", text)
            return int(start), int(end) - 1
        if what in ("get_program_id", "get_num_programs"):
            count = self._grid["xyz".index(text.split()[1])]
            return (0, count - 1) if what == "get_program_id" else (count, count)
        if what == "select":
            return _hull(given[1:])
        hull = _hull(given)
        if hull is None or what in _SAME:
            return hull
        if what == "trunci":
            return hull if _fits(hull) else None
        known = [k for k in given if k is not None]
        if what in _LEAST and known[1][0] < _LEAST[what]:
            return None
        if what == "remsi":
            most = known[1][1] - 1
            return max(-most, min(0, known[0][0])), min(most, max(0, known[0][1]))
        if what not in _MONOTONE:
            return None
        ends = [_MONOTONE[what](a, b) for a, b in product(*known)]
        return min(ends), max(ends)


def _hull(given: Sequence[Interval | None]) -> Interval | None:
    """What one of several values may be."""
    known = [k for k in given if k is not None]
    if not known or len(known) < len(given):
        return None
    return min(k[0] for k in known), max(k[1] for k in known)


def _fits(known: Interval) -> bool:
    return known[0] >= -(2**31) and known[1] < 2**31

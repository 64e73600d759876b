"""No address, mask or loop of a kernel overflows 32 bits, however large its tensors are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from opfuser.kernels.launch import INTERPRETED, Launch, Recorded

pytest.importorskip("triton", reason="Triton exists for Linux only")
if INTERPRETED:
    pytest.skip("the interpreter's process compiles nothing", allow_module_level=True)

import triton
import triton.language as tl

from tests.kernels.overflows import overflows
from tests.kernels.shipping import empty
from tests.kernels.test_compilation import FAMILIES, launches

# Of the largest tensor: 64 GiB in fp8, more than which no GPU has for one beside others.
ELEMENTS = 2**36
MAX_GRID = 2**31 - 1, 2**16 - 1, 2**16 - 1
# What addresses depend on, of all constants.
LAYOUTS = {"EVEN", "INTERLEAVE", "NARROW", "INTERLEAVED", "SQUARE_COLS", "H_SQUARE_COLS", "EIGHT"}


def enlarged(argument: Any) -> Any:
    """With so many rows, or models with so many sequences, that a tensor has ELEMENTS."""
    if isinstance(argument, Tensor) and argument.dim() > 1:
        rows = -(-ELEMENTS // argument[0].numel() // 128) * 128
        return empty(rows, *argument.shape[1:], dtype=argument.dtype)
    if hasattr(argument, "batch"):
        one = argument._replace(batch=1).packed().numel()
        return argument._replace(batch=-(-ELEMENTS // one))
    return argument


def distinct(family: str) -> dict[object, tuple[str, Recorded]]:
    """Launches of each function and layout with most and with least tensors, and their calls."""
    found: dict[object, tuple[str, Recorded]] = {}
    for name, (call, _) in FAMILIES[family].items():
        assert isinstance(call, partial)
        large = partial(call.func, *map(enlarged, call.args), **call.keywords)
        for noted in launches(large):
            constants = {k: v for k, v in noted.launch.constants.items() if k in LAYOUTS}
            for sign in (1, -1):
                key = noted.launch.name, str(constants), sign
                if key not in found or sign * tensors(noted) > sign * tensors(found[key][1]):
                    found[key] = name, noted
    return found


def tensors(noted: Recorded) -> int:
    return sum(t is not None for t in noted.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_kernel_overflows(family: str) -> None:
    for name, noted in dict.fromkeys(distinct(family).values()):
        assert not (found := overflows(noted)), "\n".join([name, *found])
        assert all(n <= most for n, most in zip(noted.grid, MAX_GRID)), f"{name}: {noted.grid}"


@triton.jit
def by_rows(x_ptr, rows, cols, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    col = tl.arange(0, BLOCK)
    at = x_ptr + row * cols + col
    tl.store(at, tl.load(at, mask=col < cols), mask=col < cols)


@triton.jit
def by_elements(x_ptr, rows, cols, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) % rows * BLOCK
    if WIDE:
        first = tl.program_id(0).to(tl.int64) % rows * BLOCK
    tl.store(x_ptr + tl.arange(0, BLOCK), 0, mask=first + tl.arange(0, BLOCK) < 2147483647)


@triton.jit
def by_turns(x_ptr, rows, cols, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    step = tl.num_programs(0) * BLOCK
    if WIDE:
        step = step.to(tl.int64)
    for first in range(tl.program_id(0), tl.cast(rows, step.dtype), step):
        row = tl.minimum(first, 8)
        if row > 4:
            row = 4 * tl.cdiv(row, 4)
        tl.store(x_ptr + row, 0)


@pytest.mark.parametrize(
    ("kernel", "grid", "ints"),
    [
        (by_rows, 16384, (16384, 152064)),
        (by_elements, 2**25 + 1, (2**26, 8)),
        (by_turns, 2112, (2**31 - 1024, 8)),
    ],
)
def test_what_overflows_is_found(
    kernel: Any, grid: int, ints: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "function", kernel)

    def found(wide: bool, programs: int, numbers: tuple[int, int]) -> list[str]:
        launch = Launch(kernel.__name__, {"WIDE": wide, "BLOCK": 64})
        monkeypatch.setattr(Launch, "values", (wide, 64))
        return overflows(Recorded(launch, (programs, 1, 1), (empty(1),), numbers, ()))

    assert not found(True, grid, ints)
    assert not found(False, 2048, (2048, ints[1]))
    assert found(False, grid, ints)

"""The checker of accesses itself: it finds each kind of access out of bounds, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from opfuser.kernels.launch import INTERPRETED

pytest.importorskip("triton", reason="Triton exists for Linux only")
if not INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.bounds import OutOfBounds


@triton.jit
def loads(x_ptr, y_ptr, stop, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < stop), mask=i < 10)


@triton.jit
def store_until(ptr, stop, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(ptr + i, 1.0, mask=i < stop)


@triton.jit
def stores(x_ptr, y_ptr, stop, N: tl.constexpr):
    store_until(y_ptr, stop, N)


@triton.jit
def unmasked(x_ptr, y_ptr, stop, N: tl.constexpr):
    tl.store(y_ptr + stop - 1, tl.load(x_ptr + stop - 1))


@triton.jit
def before(x_ptr, y_ptr, stop, N: tl.constexpr):
    tl.store(y_ptr, tl.load(x_ptr + 10 - stop))


@triton.jit
def adds(x_ptr, y_ptr, stop, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(y_ptr + i, 1.0, mask=i < stop)


@triton.jit
def swaps(x_ptr, y_ptr, stop, N: tl.constexpr):
    ptr = y_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_cas(ptr + stop - 1, 0, 1)


@triton.jit
def wide_words(x_ptr, y_ptr, stop, N: tl.constexpr):
    ptr = y_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    tl.store(ptr + (stop - 1) // 2, tl.cast(0, tl.int64))


@triton.jit
def described(x_ptr, y_ptr, stop, N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, (stop,), (1,), (N,))
    tl.store(y_ptr + tl.arange(0, 8), x.load((8,)).reshape(2, 8).sum(0))


@triton.jit
def described_stores(x_ptr, y_ptr, stop, N: tl.constexpr):
    y = tl.make_tensor_descriptor(y_ptr, (stop,), (1,), (N,))
    y.store((0,), tl.zeros((N,), tl.float32))


@triton.jit
def blocks(x_ptr, y_ptr, stop, N: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (stop,), (1,), (0,), (N,), (0,))
    y = tl.make_block_ptr(y_ptr, (10,), (1,), (0,), (N,), (0,))
    tl.store(y, tl.load(x, boundary_check=(0,)), boundary_check=(0,))


@triton.jit
def by_address(addresses_ptr, y_ptr, stop, N: tl.constexpr):
    x_ptr = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    loads(x_ptr, y_ptr, stop, N)


@triton.jit
def rows(x_ptr, y_ptr, stride, cols, N: tl.constexpr):
    i = tl.arange(0, N)
    at = tl.arange(0, 4)[:, None] * stride + i[None, :]
    tl.store(y_ptr + i, tl.sum(tl.load(x_ptr + at, mask=(i < cols)[None, :]), 0), mask=i < cols)


@triton.jit
def hints(y_ptr, first, step, N: tl.constexpr):
    i = first + tl.arange(0, N) // 4 * step + tl.arange(0, N) % 4
    tl.store(y_ptr + tl.max_contiguous(tl.multiple_of(i, 4), 4), 1.0)


KERNELS = [loads, stores, unmasked, before, adds, swaps, wide_words, described, described_stores]
# Triton 3.9 has no block pointers any more.
KERNELS += [blocks] if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9) else []


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_first_element_beyond_a_tensor_is_found(kernel: Any) -> None:
    x, y = torch.zeros(10), torch.zeros(10)
    kernel[(1,)](x, y, 10, 16)
    with pytest.raises(OutOfBounds, match=r"of (4|8) bytes"):
        kernel[(1,)](x, y, 11, 16)


def test_errors_say_what_and_where() -> None:
    y = torch.zeros(10)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = lines.index("    tl.store(ptr + i, 1.0, mask=i < stop)") + 1
    text = "stores: store of 4 bytes outside the memory of y_ptr: at byte 40 of 40; 3 of 13 lanes"
    with pytest.raises(OutOfBounds, match=rf"^{text} \(store_until, \S+bounds.py:{line}\)$"):
        stores[(1,)](y, y, 13, 16)


@pytest.mark.parametrize("other", [-1, 1])
def test_memory_of_another_tensor_is_out_of_bounds(other: int) -> None:
    both = torch.zeros(3, 10)
    with pytest.raises(OutOfBounds, match="outside the view x_ptr"):
        unmasked[(1,)](both[1], both[1 + other], 10 * other + 1, 16)
    x, y = torch.zeros(10), torch.zeros(10)
    with pytest.raises(OutOfBounds, match="outside the memory of x_ptr"):
        unmasked[(1,)](x, y, (y.data_ptr() - x.data_ptr()) // 4 + 1, 16)


def test_gaps_of_a_view_are_out_of_bounds() -> None:
    x, y = torch.ones(4, 12)[:, 1:11], torch.zeros(16)
    rows[(1,)](x, y, 12, 10, 16)
    assert y.tolist() == [4.0] * 10 + [0.0] * 6
    with pytest.raises(OutOfBounds, match=re.escape("x_ptr: at byte 40 of 4 x 40, 48 apart; 4 of")):
        rows[(1,)](x, y, 12, 11, 16)
    rows[(1,)](torch.ones(1, 12)[:, 1:11].expand(4, 10), y, 0, 10, 16)
    rows[(1,)](torch.ones(20).as_strided((4, 10), (2, 1)), y, 2, 10, 16)  # they overlap
    with pytest.raises(OutOfBounds, match="lanes"):
        rows[(1,)](torch.ones(20).as_strided((4, 10), (2, 1)), y, 2, 11, 16)
    with pytest.raises(OutOfBounds, match="0"):
        rows[(1,)](torch.ones(4, 0), y, 0, 1, 16)


def test_addresses_in_memory_are_those_of_tensors() -> None:
    x, y = torch.ones(10), torch.zeros(10)
    addresses = torch.tensor([x.data_ptr()])
    by_address[(1,)](addresses, y, 10, 16)
    assert y.tolist() == [1.0] * 10
    with pytest.raises(OutOfBounds, match=r"^by_address: load of 4 bytes .* in no tensor .loads"):
        by_address[(1,)](addresses, y, 2**20, 2**20)


def test_descriptors_are_of_their_tensors() -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    copies[(1,)](TensorDescriptor.from_tensor(x, [4]), y)
    with pytest.raises(OutOfBounds, match="outside the memory"):
        copies[(1,)](TensorDescriptor(x, [12], [1], [4]), y)


@triton.jit
def copies(x, y_ptr):
    tl.store(y_ptr + tl.arange(0, 4), x.load([4]) + x.load([8]))


@pytest.mark.parametrize(("first", "step"), [(2, 4), (0, 6)])
def test_hints_are_held_to_values(first: int, step: int) -> None:
    y = torch.zeros(32)
    hints[(1,)](y, 4, 8, 16)
    with pytest.raises(OutOfBounds, match="not 4 neighbors from a multiple of 4 on"):
        hints[(1,)](y, first, step, 16)

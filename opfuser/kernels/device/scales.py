"""New scales from the largest values that were seen, of many operations at once; one per program.

What belongs to an operation has three elements, or columns, one for each role.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import largest_along, scale_to


@triton.jit
def update(
    addresses_ptr, numbers_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Enters ``amax`` into the history, computes ``scale``, and empties ``amax``.

    addresses (operations, 5): of scale, of the history, and of amax; the history's length, and
    whether its first row alone counts. numbers (operations, 4): the largest value of each role's
    format, and what scales are multiplied by.
    """
    addresses_ptr += tl.program_id(0) * 5
    numbers_ptr += tl.program_id(0) * 4
    scale_ptr = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    history_ptr = tl.load(addresses_ptr + 1).to(tl.pointer_type(tl.float32))
    amax_ptr = tl.load(addresses_ptr + 2).to(tl.pointer_type(tl.float32))
    length = tl.load(addresses_ptr + 3).to(tl.int32)
    role = tl.arange(0, 4)
    exists = role < 3
    amax = tl.load(amax_ptr + role, mask=exists, other=0.0)
    latest = tl.load(history_ptr + role, mask=exists, other=0.0)
    usable = tl.where(amax < float("inf"), amax, 0.0)
    seen = usable > 0.0
    # A sum of integers: the interpreter gives a truth value that is spread over a block their type,
    # and that of triton 3.9 takes no such mask.
    any_in_many = (length > 1).to(tl.int32) * tl.max(seen.to(tl.int32), 0)
    entered = (seen.to(tl.int32) + any_in_many) > 0
    latest = tl.where(entered, usable, latest)

    # The oldest rows move first. All are loaded before those after them are stored.
    most = tl.zeros((4,), tl.int32)
    blocks = tl.cdiv(length, BLOCK)
    for block in range(blocks):
        row = ((blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK))[:, None]
        at = history_ptr + row * 3 + role[None, :]
        inside = (row < length) & exists[None, :]
        values = tl.load(at, mask=inside, other=0.0)
        last = row + 1 == length
        tl.debug_barrier()
        tl.store(at + 3, values, mask=inside & entered[None, :] & (row + 1 < length))
        kept = tl.where(last & entered[None, :], 0.0, values)
        most = tl.maximum(most, largest_along(kept, 0).to(tl.int32, bitcast=True))
    most = tl.maximum(most, latest.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    most = tl.where(tl.load(addresses_ptr + 4) != 0, latest, most)
    top = tl.load(numbers_ptr + role)
    scale = scale_to(top, most, False) * tl.load(numbers_ptr + 3)
    tl.debug_barrier()  # another thread's loads may still be under way
    tl.store(history_ptr + role, latest, mask=exists)
    tl.store(scale_ptr + role, scale, mask=exists & (most > 0.0))
    tl.store(amax_ptr + role, tl.zeros((4,), tl.float32), mask=exists)

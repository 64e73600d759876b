"""Every configuration that is shipped assembles, and keeps to registers; none moves too much."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from opfuser.kernels.launch import INTERPRETED, Recorded, recorded
from opfuser.kernels.scales import KeptScales, update_scales

pytest.importorskip("triton", reason="Triton exists for Linux only")
if INTERPRETED:
    pytest.skip("the interpreter's process compiles nothing", allow_module_level=True)

import triton

from tests.kernels.compiling import Report, compiled, identity
from tests.kernels.shipping import Family, empty

SHIPPED = Path(__file__).parent / "shipped"
FAMILIES: dict[str, Family] = {
    path.stem: importlib.import_module(f"tests.kernels.shipped.{path.stem}").SHIPPED
    for path in sorted(SHIPPED.glob("*.py"))
}
# KiB that a program may be lent, of an A100 and of later ones.
SHARED = {80: 163, 90: 227, 100: 227}
# Bytes of a thread. 16 warps may have 128 registers per thread; with the --regAllocOptLevel=2 that
# Triton 3.7 passes, ptxas needs more for the first. Without the option it does not. The others are
# of Triton 3.7 and of 3.6: ptxas keeps 16 warps to 64, so that two programs fit a multiprocessor.
SPILLED = {
    (100, "layer, y 8192 torch.bfloat16"): 16,
    (90, "rms 4096 x 16384 torch.bfloat16 with amax"): 8,
    (100, "rms 4096 x 16384 torch.bfloat16 with amax"): 8,
}
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
if VERSION == (3, 6):
    SPILLED |= {
        (90, "clamped 4096 x 2880 torch.bfloat16 backward with amax of h"): 8,
        (90, "gelu 4000 x 16384 torch.bfloat16 backward in blocks, h in squares"): 8,
    }
if VERSION == (3, 8):
    SPILLED |= {
        (90, "swiglu 8100 x 14336 torch.bfloat16 backward in blocks"): 8,
        (90, "swiglu 8100 x 14336 torch.bfloat16 backward in blocks, h in squares"): 8,
        (90, "8192 in 32 x 784 torch.bfloat16 vectors rows"): 8,
    }
# Triton 3.9 keeps more values at once.
if VERSION >= (3, 9):
    SPILLED |= {
        (100, "gradient 50257 torch.bfloat16 0.1"): 8,  # 8 warps have 64 registers per thread
        (90, "reglu 4096 x 16384 torch.bfloat16 backward in blocks"): 16,
        (90, "reglu 4096 x 16384 torch.bfloat16 backward in blocks with sums"): 8,
        (90, "geglu 4096 x 16384 torch.bfloat16 amax of dx and h from codes"): 8,
        (90, "situ 4096 x 2048 torch.bfloat16 forward that saves x"): 8,
    }
# Calls whose threads read 8 bytes at a time: so 0.180 ms on an H200, and 0.204 with 16.
NARROW = ("amax of dx and h",)


def launches(call: Callable[[], object]) -> list[Recorded]:
    with recorded() as noted:
        call()
    return noted


def distinct(family: str) -> dict[str, tuple[str, Recorded]]:
    """What runs a binary of its own, and the name of the call that launches it."""
    calls = FAMILIES[family].items()
    return {identity(noted): (name, noted) for name, it in calls for noted in launches(it.call)}


FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}


def exists(noted: Recorded, capability: int) -> bool:
    """Whether it is launched there: GPUs before 8.9 convert nothing to fp8, before 10.0 to fp4."""
    if "CONVERTS" in noted.launch.constants:
        return noted.launch.constants["CONVERTS"] == (capability >= 100) and capability >= 89
    dtypes = {tensor.dtype for tensor in noted.tensors if tensor is not None}
    return capability >= 89 or not dtypes & FP8


def check(call: str, noted: Recorded, capability: int) -> Report:
    report = compiled(noted, capability)
    text = f"sm_{capability} {report}  {call}: {noted.launch}"
    print(text)  # noqa: T201  # a table where pytest shows output (-s)
    assert report.stack <= SPILLED.get((capability, call), 0), f"spilled: {text}"
    least = 8 if any(name in call for name in NARROW) else 16
    assert report.widest_access >= least, f"accesses less than {least} bytes at a time: {text}"
    assert report.shared <= SHARED[capability] * 1024, f"does not fit: {text}"
    return report


def share_of_registers(noted: Recorded, report: Report) -> float:
    """Of what the warps of a program may have: 255 per thread, and 65536 together."""
    return report.registers / min(255, 65536 // (32 * noted.launch.num_warps))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_shipped_compiles_and_spills_nothing(family: str) -> None:
    """All for sm_90, or sm_100 if it is for that alone; for sm_80 and sm_100 what comes close.

    Those are launches with three quarters of the registers that their warps may have, and of each
    function that with the largest share, for each size of an element, and that with the most
    shared memory. Of 206 launches these had the largest shares on sm_80 and sm_100 too.
    """
    all_of_them = distinct(family)
    reports = {b: check(*found, 90) for b, found in all_of_them.items() if exists(found[1], 90)}
    for binary, found in all_of_them.items():
        if binary not in reports:
            check(*found, 100)
    shares = {b: share_of_registers(all_of_them[b][1], report) for b, report in reports.items()}
    close: dict[object, str] = {}  # of those with the same key the last stays
    for binary in sorted(shares, key=lambda b: shares[b]):
        _, noted = all_of_them[binary]
        key = noted.launch.name, noted.tensors[0].itemsize
        close[binary if shares[binary] >= 0.75 else key] = binary
    for binary in sorted(reports, key=lambda b: reports[b].shared):
        close[all_of_them[binary][1].launch.name] = binary
    for binary in dict.fromkeys(close.values()):
        for capability in (80, 100):
            if exists(all_of_them[binary][1], capability):
                check(*all_of_them[binary], capability)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_updates_of_scales_compile(capability: int) -> None:
    """Not among the above: rows of three elements are no wide accesses."""
    buffers = empty(3, dtype=torch.float32), empty(1024, 3, dtype=torch.float32)
    e4m3 = torch.float8_e4m3fn
    kept = KeptScales(*buffers, torch.empty_like(buffers[0]), (e4m3,) * 3, 0, False)
    (noted,) = launches(lambda: update_scales([kept]))
    assert compiled(noted, capability).stack == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_launchers_move_no_more_than_they_must(family: str) -> None:
    """Per-row statistics and partial sums are what the two percent are for."""
    for name, (call, traffic) in FAMILIES[family].items():
        noted = launches(call)
        assert noted, f"{name} launches nothing"
        moved = sum(one.traffic for one in noted)
        assert moved <= 1.02 * traffic, f"{name}: {moved} bytes"

"""Compiles noted launches for GPUs that are not there, and reads what their kernels use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from opfuser.kernels.launch import Recorded

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
DIVISIBLE = [["tt.divisibility", 16]]
CUOBJDUMP = knobs.nvidia.cuobjdump.path


class Report(NamedTuple):
    """What became of one launch on one architecture.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread in local memory, among them whatever is spilled.
        shared: bytes of a program in shared memory.
        widest_access: bytes of the widest access to global memory by one thread.
    """

    registers: int
    stack: int
    shared: int
    widest_access: int

    def __str__(self) -> str:
        return (
            f"{self.registers:>4} registers {self.stack:>4} B on the stack {self.shared:>6} B "
            f"shared {self.widest_access:>3} B accesses"
        )


def signature(
    noted: Recorded,
) -> tuple[dict[str, str], dict[tuple[int], object], dict[object, object]]:
    """Types, constants and alignments, as Triton would find them at a call."""
    names = noted.launch.function.arg_names
    types: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    attributes: dict[object, object] = {}
    args = (*noted.tensors, *noted.ints, *noted.floats)
    for index, (name, arg) in enumerate(zip(names, args)):
        if isinstance(arg, Tensor):
            types[name] = "*" + TYPES[arg.dtype]
            attributes[(index,)] = DIVISIBLE
        elif isinstance(arg, float):
            types[name] = "fp32"
        elif arg is None or arg == 1:
            types[name] = "constexpr"
            constants[(index,)] = arg
        else:
            types[name] = "i64" if arg >> 31 else "i32"
            if arg % 16 == 0:
                attributes[(index,)] = DIVISIBLE
    for index, value in enumerate(noted.launch.values, len(args)):
        types[names[index]] = "constexpr"
        constants[(index,)] = value
    assert len(types) == len(names), f"{noted.launch}: takes {names}, got {list(types)}"
    return types, constants, attributes


def identity(noted: Recorded) -> str:
    """Equal for launches that run the same binary."""
    types, _, attributes = signature(noted)
    return f"{noted.launch} {types} {sorted(map(str, attributes))}"


def compiled(noted: Recorded, capability: int) -> Report:
    types, constants, attributes = signature(noted)
    launch = noted.launch
    kernel = triton.compile(
        ASTSource(launch.function, types, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    usage = usage_of(kernel.asm["cubin"])
    return Report(
        registers=_number("REG", usage),
        stack=_number("STACK", usage) + _number("LOCAL", usage),
        shared=kernel.metadata.shared,
        widest_access=widest_access(kernel.asm["ptx"]),
    )


def usage_of(cubin: bytes) -> str:
    """The line in which NVIDIA's tool, which comes with Triton, states what a kernel uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()[-1]


def widest_access(ptx: str) -> int:
    """Bytes of the widest access to global memory by one thread."""
    widest = 0
    for vector, bits in re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx):
        widest = max(widest, int(vector or 1) * int(bits) // 8)
    return widest


def _number(name: str, usage: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", usage)
    assert found, usage
    return int(found[1])

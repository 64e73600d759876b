"""Compiles noted launches for GPUs that are not there, and reads what the assembler reports."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
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
}
DIVISIBLE = [["tt.divisibility", 16]]


class Report(NamedTuple):
    """What became of one launch on one architecture."""

    registers: int
    spilled: int
    stack: int
    shared: int
    widest_access: int

    def __str__(self) -> str:
        return (
            f"{self.registers:>4} registers {self.spilled:>4} B spilled {self.shared:>6} B shared "
            f"{self.widest_access:>3} B accesses"
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
    ptx = kernel.asm["ptx"]
    log = assembled(ptx, capability)
    return Report(
        registers=_number(r"Used (\d+) registers", log),
        spilled=_number(r"(\d+) bytes spill stores", log)
        + _number(r"(\d+) bytes spill loads", log),
        stack=_number(r"(\d+) bytes stack frame", log),
        shared=kernel.metadata.shared,
        widest_access=widest_access(ptx),
    )


def assembled(ptx: str, capability: int) -> str:
    """What the assembler says of ``ptx``; kept beside Triton's own cache."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")) / "reports"
    key = hashlib.sha256(f"{triton.__version__} {ptx}".encode()).hexdigest()  # has its assembler
    log = cache / f"{key}-{capability}.txt"
    if not log.exists():
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(ptx)
            target = f"sm_{capability}" + ("a" if capability >= 90 else "")
            command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", str(source)]
            result = subprocess.run(
                [*command, "-o", str(source.with_suffix(".cubin"))],
                capture_output=True,
                text=True,
                check=True,
            )
        cache.mkdir(parents=True, exist_ok=True)
        log.write_text(result.stderr + result.stdout)
    return log.read_text()


def widest_access(ptx: str) -> int:
    """Bytes of the widest access to global memory by one thread."""
    widest = 0
    for vector, bits in re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx):
        widest = max(widest, int(vector or 1) * int(bits) // 8)
    return widest


def _number(pattern: str, log: str) -> int:
    return sum(map(int, re.findall(pattern, log)))

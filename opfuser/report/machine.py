"""The machine and the versions that a figure or a complaint depends on."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import counted

PACKAGES = (
    "triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "transformer-engine",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """The device, if there is one, the processor, and versions."""
    return {
        **_gpu(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_versions(),
        "opfuser": __version__,
    }


def summary() -> str:
    """One line: what a figure was measured on."""
    about = machine()
    device = about.get("device") or f"{about['processor']}, {counted(about['threads'], 'thread')}"
    names = ("opfuser", "torch", "triton", "cuda")
    versions = ", ".join(f"{name} {about[name]}" for name in names if about.get(name))
    return f"{device}; {versions}"


def _gpu() -> dict[str, Any]:
    """The current CUDA device; empty without one."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str:
    """Version of NVIDIA's driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return (answer.stdout.split() or ["unknown"])[0]


def _versions() -> dict[str, str]:
    """Versions of the installed packages that a figure depends on."""
    installed = {d.name.lower().replace("_", "-"): d.version for d in metadata.distributions()}
    return {name: installed[name] for name in PACKAGES if name in installed}


def _processor() -> str:
    """The model name on Linux, where platform gives none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""What a figure was measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import opfuser


def machine() -> dict[str, Any]:
    return {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "opfuser": opfuser.__version__,
    }


def processor() -> str:
    """The model name on Linux, where platform gives none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

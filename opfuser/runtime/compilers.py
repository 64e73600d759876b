"""The C compiler with which Triton builds what launches its kernels, and the driver below it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path


def trouble() -> str | None:
    """What keeps Triton from building, in a sentence with the remedy; None: nothing does."""
    named = os.environ.get("CC")
    if named is not None:
        if shutil.which(named) is None:
            return f"Triton finds no C compiler: CC is {named!r}, which is no program. Unset it"
    elif shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton finds no C compiler: install gcc, or name one in the variable CC"
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        return (
            f"Triton's C compiler finds no Python.h in {include}: install the headers of Python, "
            "python3-dev on Debian and Ubuntu"
        )
    return None


def reason(error: Exception) -> str | None:
    """What an error of a launch comes of, in a sentence with the remedy; None: anything else."""
    text = str(error)
    if "libcuda.so" in text or "ldconfig" in text:
        return (
            "Triton does not find libcuda.so.1, which comes with NVIDIA's driver: install the "
            "driver, or name the folder in the variable TRITON_LIBCUDA_PATH"
        )
    of_program = isinstance(error, (subprocess.CalledProcessError, FileNotFoundError))
    return trouble() if of_program or "C compiler" in text else None

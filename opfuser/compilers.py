"""The C compiler with which Triton builds what launches its kernels."""

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


def explains(error: Exception) -> bool:
    """Whether an error may come of such trouble: one of a program, or of none that was found."""
    of_program = isinstance(error, (subprocess.CalledProcessError, FileNotFoundError))
    return of_program or "C compiler" in str(error)

"""What keeps a GPU from being used, or kernels from running on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from ..attention import cudnn_versions
from ..runtime import compilers

_OLDEST = 8, 0  # what kernels are compiled for by the tests
_DRIVER = "/dev/nvidiactl"  # is there where a driver is loaded


def of_used(capability: tuple[int, int], *, has_triton: bool) -> Iterator[str]:
    """What is wrong with a GPU that torch uses, a sentence for each."""
    number = f"{capability[0]}.{capability[1]}"
    if capability < _OLDEST:
        yield (
            f"The GPU has compute capability {number}; kernels are made for "
            f"{_OLDEST[0]}.{_OLDEST[1]} and later."
        )
    if not has_triton:
        yield "There is a GPU but no Triton, so no kernel runs: pip install triton."
    elif compilers.trouble() is not None:
        yield f"{compilers.trouble()}."
    if not is_built_for(capability, torch.cuda.get_arch_list()):
        yield (
            f"torch {torch.__version__} was not built for GPUs of compute capability {number}: "
            "install a build that is, as https://pytorch.org says."
        )
    trouble = cudnn_versions.trouble()
    if trouble is not None:
        yield f"{trouble}."


def is_built_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a torch that was built for ``sm_80``, ``compute_90`` and the like runs on a GPU.

    Binaries run on later GPUs of their major version, what is compiled at load on any later one.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        if digits.isdecimal():
            built = int(digits[:-1]), int(digits[-1])
            if built <= capability and (kind == "compute" or built[0] == capability[0]):
                return True
    return not architectures


def of_unused() -> Iterator[str]:
    """What is wrong where torch uses no GPU; nothing if the system has none."""
    if os.path.exists(_DRIVER):
        yield f"The machine has a GPU that torch does not use: {_why_unused()}."


def _why_unused() -> str:
    """Why torch sees nothing of a GPU that the system has, and what to do."""
    version = torch.version.cuda
    if version is None:
        return (
            f"torch {torch.__version__} is a build without CUDA; install one with it, as "
            "https://pytorch.org says"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides it; unset it"
    try:
        torch.cuda.init()
        reason = "it finds none"
    except (AssertionError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
    return f"{reason}; install a driver for CUDA {version} or later, and see that nvidia-smi runs"

"""Whether the cuDNN of this process is the one that torch was built with.

With another one, torch may take a kernel for attention that is half as fast, and says nothing.
"""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path

import torch

from .. import torch_internals as internals

_MAPS = Path("/proc/self/maps")


def libraries(maps: str) -> list[str]:
    """The paths of the main library of cuDNN, from the text of ``/proc/self/maps``."""
    return sorted(set(re.findall(r"\s(/\S*libcudnn\.so\S*)", maps)))


def _version(number: int) -> str:
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


@functools.lru_cache(1)
def trouble() -> str | None:
    """What is wrong with the cuDNN that was loaded, or None."""
    if not torch.backends.cudnn.is_available():
        return None
    built, loaded = _versions()
    if built != loaded:
        return (
            f"cuDNN {_version(loaded)} is loaded, and torch was built with {_version(built)}: "
            "its attention may not be available"
        )
    found = libraries(_MAPS.read_text()) if _MAPS.exists() else []
    if len(found) > 1:
        return f"Several libraries of cuDNN are loaded: {', '.join(found)}"
    return None


def _versions() -> tuple[int, int]:
    """The cuDNN built for and the one loaded: major * 10000 + minor * 100 + patch."""
    built = internals.cudnn_built()
    loaded = internals.cudnn_loaded()
    return tuple(a * 10000 + b * 100 + c for a, b, c in (built, loaded))


@functools.lru_cache(None)
def warn_once(device: torch.device) -> None:
    """Warns if cuDNN was passed over on a GPU of Hopper's age and its libraries are the reason."""
    text = trouble()
    if text is not None and torch.cuda.get_device_capability(device) >= (9, 0):
        warnings.warn(
            f"Attention runs without cuDNN, which would be faster. {text}. Remove the other "
            "library from the process (LD_LIBRARY_PATH, packages that bring their own).",
            stacklevel=2,
        )

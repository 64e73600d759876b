"""What this process would run, and what is wrong with it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import torch

from ..attention.call import Request, enabled_kernels
from ..attention.choice import KERNELS
from ..engine.replayed.options import current
from ..errors import ConfigError, counted
from ..gemm_providers import names as gemm_providers
from ..registry import effective, fusions, plugins, registry
from ..registry.configuration import as_yaml
from ..runtime.libraries import version
from ..torch_internals import TESTED
from . import gpu_problems
from .machine import machine

KNOWN_VARIABLES = (
    "OPFUSER_CONFIG",
    "OPFUSER_DISABLE",
    "OPFUSER_DUMP_DIR",
    "OPFUSER_DUMP_RANKS",
    "OPFUSER_ENABLE",
    "OPFUSER_REPLAY",
    "OPFUSER_SPECIALIZE",
)
_OTHER_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
)
_FP8, _FP4 = (8, 9), (10, 0)


class Row(NamedTuple):
    """One line: what, and what is the case."""

    name: str
    value: str


class Examination(NamedTuple):
    """What was found.

    Attributes:
        sections: title and rows.
        problems: what is wrong, a sentence for each.
    """

    sections: tuple[tuple[str, tuple[Row, ...]], ...]
    problems: tuple[str, ...]


def examine() -> Examination:
    """Looks at versions, device, kernels, packages, plug-ins, switches and environment variables.

    Nothing is computed on the device.
    """
    sections = (
        ("versions and machine", _machine()),
        ("kernels", _kernels()),
        ("packages of extras", _packages()),
        ("plug-ins", _plugins()),
        ("configuration in effect", _configuration()),
        ("environment variables", _variables()),
    )
    return Examination(
        tuple((title, tuple(rows)) for title, rows in sections), tuple(dict.fromkeys(_problems()))
    )


def _machine() -> Iterator[Row]:
    about = machine()
    for name in ("opfuser", "torch", "triton", "python"):
        yield Row(name, str(about.get(name, "not installed")))
    if "device" not in about:
        yield Row("GPU", "none that torch sees; plain torch computes on the CPU")
    else:
        yield Row(
            "GPU",
            f"{about['device']}, compute capability {about['capability']}, "
            f"{about['memory_gib']} GiB, {about['multiprocessors']} multiprocessors",
        )
        yield Row("CUDA, driver", f"{about['cuda']}, {about['driver']}")
        number = torch.backends.cudnn.version()
        if number is not None:
            major, rest = divmod(number, 10000)
            yield Row("cuDNN", f"{major}.{rest // 100}.{rest % 100}")
    yield Row(
        "processor", f"{about['processor']}, {about['cpu']}, {counted(about['threads'], 'thread')}"
    )


def _capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _kernels() -> Iterator[Row]:
    capability = _capability()
    no_gpu = capability is None
    triton = version("triton")
    if triton is None:
        state = "not installed: plain torch computes in their place"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        state = "interpreted (TRITON_INTERPRET=1): for tests, and slow"
    else:
        state = "no GPU: plain torch computes in their place" if no_gpu else "run on this GPU"
    yield Row("Triton", state)
    rows = {dtype: list(_attention(dtype)) for dtype in (torch.bfloat16, torch.float32)}
    same = len(set(map(tuple, rows.values()))) == 1
    for dtype, (first, *others) in rows.items():
        if not same:
            yield Row(f"attention, {str(dtype).removeprefix('torch.')}", first.value)
        elif dtype == torch.bfloat16:
            yield first
        else:
            break
        yield from others
    for name, least in (("FP8", _FP8), ("FP4", _FP4)):
        has = capability is not None and capability >= least
        wanted = f"needs compute capability {least[0]}.{least[1]}"
        yield Row(f"GEMMs in {name}", "on this GPU" if has else f"emulated: {wanted}")
    yield Row("GEMM providers", ", ".join(gemm_providers()))
    yield Row("fp32 GEMMs", f"precision {torch.get_float32_matmul_precision()!r}")


def _attention(dtype: torch.dtype) -> Iterator[Row]:
    """The kernels that take a call whose sizes every one of them takes, and why others do not."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = 64, 64, 8, 8, 64, 64
    given = enabled_kernels(device)
    request = Request(device, dtype, *sizes, True, True, enabled=given)
    reasons = {name: kernel.refusal(request) for name, kernel in KERNELS.items()}
    taken = " or ".join(name for name, why in reasons.items() if why is None)
    yield Row("attention", f"{taken}, as sizes and keywords allow")
    for name, why in reasons.items():
        if why is not None:
            yield Row(f"  not {name}", why)


# Extras for changing opfuser itself, whose packages no user misses.
_DEVELOPMENT = {"dev", "docs", "test"}


class _Requirement(NamedTuple):
    name: str
    bounds: str
    extras: tuple[str, ...]
    everywhere: bool = True

    @property
    def remedy(self) -> str:
        """What installs it."""
        return f"Run pip install '{self.name}{self.bounds}'"


def _requirements() -> list[_Requirement]:
    """What the installed opfuser asks for; nothing if it runs from a folder of sources."""
    out: dict[tuple[str, str, bool], list[str]] = {}
    try:
        lines = metadata.requires("opfuser") or []
    except metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        text, _, marker = line.partition(";")
        read = re.fullmatch(r"\s*([\w.-]+)(?:\[[\w,-]+\])?\s*(.*?)\s*", text)
        if read is not None:
            extras = re.findall(r"extra == ['\"]([\w-]+)['\"]", marker)
            key = read[1], read[2], "platform" not in marker
            out.setdefault(key, []).extend(extras)
    return [_Requirement(*key[:2], tuple(extras), key[2]) for key, extras in out.items()]


def _packages() -> Iterator[Row]:
    by_extra: dict[str, list[_Requirement]] = {}
    for requirement in _requirements():
        for extra in requirement.extras:
            if extra not in _DEVELOPMENT:
                by_extra.setdefault(extra, []).append(requirement)
    for extra, wanted in by_extra.items():
        found = (
            f"{r.name} {version(r.name) or '(not installed)'}"
            for r in wanted
            if r.name != "opfuser"
        )
        yield Row(extra, ", ".join(found))
    if not by_extra:
        yield Row("unknown", "opfuser is not installed as a package")


def _plugins() -> Iterator[Row]:
    found = plugins()
    for plugin in found:
        names = ", ".join(plugin.fusions) or "no fusions"
        yield Row(f"{plugin.distribution} {plugin.version}".strip(), plugin.error or names)
    origins = {plugin.distribution for plugin in found} | {"opfuser"}
    own = [handle.name for handle in registry.registered() if handle.origin not in origins]
    if own:
        yield Row("registered by the program", ", ".join(own))
    if not (found or own):
        yield Row("none", "all fusions are opfuser's own")


def _unusable() -> str:
    """What is wrong with the file of ``OPFUSER_CONFIG``; empty if it can be used."""
    try:
        fusions()
    except ConfigError as error:
        return str(error)
    return ""


def _configuration() -> Iterator[Row]:
    if _unusable():
        yield Row("unknown", "the file of OPFUSER_CONFIG cannot be used")
        return
    infos = fusions()
    yield Row("fusions", f"{sum(i.enabled for i in infos)} of {len(infos)} are on")
    off: dict[str, list[str]] = {}
    for info in infos:
        if not info.enabled:
            off.setdefault(info.disabled_by, []).append(info.name)
    for by, names in off.items():
        yield Row(f"off by {by}", ", ".join(names))
    for setting in effective():
        if setting.setting != "enabled" or setting.glob:
            at = f" in {setting.glob}" if setting.glob else ""
            what = f"{setting.setting} is {as_yaml(setting.value)}{at}"
            yield Row(setting.name, f"{what} ({setting.origin})")
    yield Row("replay", current().mode)


def _variables() -> Iterator[Row]:
    names = [name for name in os.environ if name.startswith("OPFUSER_")]
    names += [name for name in _OTHER_VARIABLES if name in os.environ]
    for name in sorted(names):
        yield Row(name, os.environ[name])
    if not names:
        yield Row("none", "of those that matter here is set")


def _problems() -> Iterator[str]:
    capability = _capability()
    if capability is None:
        yield from gpu_problems.of_unused()
    else:
        yield from gpu_problems.of_used(capability, has_triton=version("triton") is not None)
    yield from _problems_of_versions()
    for name in os.environ:
        if name.startswith("OPFUSER_") and name not in KNOWN_VARIABLES:
            yield f"No environment variable {name} is read; there are {', '.join(KNOWN_VARIABLES)}."
    yield from (
        f"The plug-in {p.name!r} of {p.distribution} ({p.value}) failed to load: {p.error}."
        for p in plugins()
        if p.error
    )
    yield from _switch_problems()


def _switch_problems() -> Iterator[str]:
    """What is wrong with the configuration and the switches of the environment."""
    unusable = _unusable()
    if unusable:
        yield f"The file of OPFUSER_CONFIG cannot be used: {unusable}"
    known = {handle.name for handle in registry.registered()} | {"*"}
    for variable in ("OPFUSER_DISABLE", "OPFUSER_ENABLE"):
        for name in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
            if name not in known:
                yield f"{variable} names {name!r}, but no fusion has that name."


def _problems_of_versions() -> Iterator[str]:
    for requirement in _requirements():
        have = version(requirement.name)
        if have is None and requirement.everywhere and not requirement.extras:
            yield f"opfuser needs {requirement.name}, which is not installed. {requirement.remedy}."
        if have is not None and not within(have, requirement.bounds):
            yield (
                f"{requirement.name} {have} is installed, and opfuser needs "
                f"{requirement.bounds}. {requirement.remedy}."
            )
    # No upper bound is asked for, which would take away a newer torch that people have already.
    for name, tested in TESTED.items():
        have, newest = version(name), tested.rpartition(" ")[2]
        if have is not None and _numbers(have)[:2] > _numbers(newest):
            yield (
                f"{name} {have} is installed, and the newest that opfuser was tested with is "
                f"{newest}."
            )


def within(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as ``<2.14,>=2.11``, by its numbers alone."""
    have = _numbers(version)
    for bound in filter(None, map(str.strip, bounds.split(","))):
        read = re.fullmatch(r"(>=|<)\s*([\d.]+)", bound)
        if read is not None and (have >= _numbers(read[2])) != (read[1] == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    read = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(n) for n in read[0].split(".")] if read else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)

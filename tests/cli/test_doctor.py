"""``opfuser doctor``: what there is, and what is wrong."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import opfuser
from opfuser.attention import cudnn_versions
from opfuser.registry.entry_points import PluginInfo
from opfuser.report import doctor, gpu_problems
from opfuser.report.machine import machine
from opfuser.runtime import compilers

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in doctor.KNOWN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return


def rows(command: Command, section: str) -> dict[str, str]:
    found = json.loads(command("doctor", "--format", "json").out)
    assert found["schema"] == "opfuser.doctor/1"
    return {row["name"]: row["value"] for row in found["sections"][section]}


def test_versions_and_device(opfuser_command: Command) -> None:
    found = rows(opfuser_command, "versions and machine")
    assert found["opfuser"] == opfuser.__version__
    assert found["torch"] == torch.__version__
    assert ("none" in found["GPU"]) == (not torch.cuda.is_available())


def test_one_thread_is_no_plural(opfuser_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, text in ((1, ", 1 thread"), (2, ", 2 threads")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert rows(opfuser_command, "versions and machine")["processor"].endswith(text)


def test_kernels_that_run_and_why_others_do_not(
    opfuser_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = rows(opfuser_command, "kernels")
    assert found["Triton"] == "no GPU: plain torch computes in their place"
    assert found["attention"].startswith("cpu or blockwise")
    assert found["  not flash"] == "it runs on a GPU, not on cpu"
    assert found["GEMMs in FP8"] == "emulated: needs compute capability 8.9"
    assert found["GEMM providers"].split(", ")[0] == "torch"


def test_packages_of_extras(opfuser_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=2.11", "no-such-thing[x]>=1; extra == 'te'"]
    wanted += [f"pytest>=8.4; extra == '{extra}'" for extra in ("hf", "dev", "docs", "test")]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    assert rows(opfuser_command, "packages of extras") == {
        "hf": f"pytest {pytest.__version__}",
        "te": "no-such-thing (not installed)",
    }


def test_fusions_of_others_and_what_is_off(opfuser_command: Command) -> None:
    rule = opfuser.Fusion("mine", "forward", (opfuser.GELU,), build=opfuser.FusedOperation)
    with opfuser.register_forward_fusion(rule), opfuser.disable("norm_linear"):
        assert rows(opfuser_command, "plug-ins") == {"registered by the program": "mine"}
        found = rows(opfuser_command, "configuration in effect")
    assert found["off by opfuser.disable"] == "norm_linear"
    assert "recompute_mlp" in found["off by default"]
    with opfuser.fusion_config({"forward": {"forward_add_rms_norm": {"min_numel": 64}}}):
        found = rows(opfuser_command, "configuration in effect")
    assert found["forward_add_rms_norm"].startswith("min_numel is 64 (")
    with opfuser.replay("on"):
        assert rows(opfuser_command, "configuration in effect")["replay"] == "on"


def test_plug_ins(opfuser_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = PluginInfo("x", "a.b:X", "some-fusions", "1.2", ("merge", "split"), "")
    broken = PluginInfo("y", "a.c", "others", "", (), "ImportError: no c")
    monkeypatch.setattr(doctor, "plugins", lambda: (fine, broken))
    assert rows(opfuser_command, "plug-ins") == {
        "some-fusions 1.2": "merge, split",
        "others": "ImportError: no c",
    }
    done = opfuser_command("doctor")
    assert done.status == 3
    assert "! The plug-in 'y' of others (a.c) failed to load: ImportError: no c." in done.out


def test_nothing_is_wrong(opfuser_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: [])
    done = opfuser_command("doctor")
    if not torch.cuda.is_available():
        assert done.status == 0
        assert done.out.endswith("\nNothing is wrong.\n")
    assert max(map(len, done.out.splitlines())) <= 80


def _gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """As torch sees it; what else there is of the machine stays what it is."""
    about = machine()
    monkeypatch.setattr(doctor, "machine", lambda: about)
    monkeypatch.setattr(doctor, "KERNELS", {})  # of attention, which ask the device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def _installed(monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


def _old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, (7, 5))


def _no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, (9, 0))
    _installed(monkeypatch, {})


def _two_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(cudnn_versions, "trouble", lambda: "Several libraries of cuDNN are loaded")


def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, (9, 0))
    _installed(monkeypatch, {"triton": "3.9.0"})
    monkeypatch.setattr(compilers, "trouble", lambda: "Triton finds no C compiler: install gcc")


def _other_build(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, (12, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])


def _unused(cuda: str | None, visible: str | None) -> Callable[[pytest.MonkeyPatch], None]:
    """A driver is loaded, and torch sees no GPU."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        _gpu(monkeypatch, None)
        is_there = os.path.exists
        loaded = lambda path: path == "/dev/nvidiactl" or is_there(path)  # noqa: E731
        monkeypatch.setattr(os.path, "exists", loaded)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "init", _no_driver)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return plant


def _no_driver() -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nMore.")


def _no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["no-such-numpy>=1.26"])


def _other_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch<2.4,>=2.0"])


def _torch_of_next_year(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {"torch": "2.99.0+cu140", "triton": "3.9.9"})


PROBLEMS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "an old GPU": (_old_gpu, "compute capability 7.5; kernels are made for 8.0 and later."),
    "no Triton": (_no_triton, "There is a GPU but no Triton, so no kernel runs"),
    "two cuDNN": (_two_libraries, "Several libraries of cuDNN are loaded."),
    "no compiler": (_no_compiler, "Triton finds no C compiler: install gcc."),
    "a torch for other GPUs": (
        _other_build,
        (
            f"torch {torch.__version__} was not built for GPUs of compute capability 12.0: "
            "install a build that is, as https://pytorch.org says."
        ),
    ),
    "a torch for CPUs": (
        _unused(None, None),
        (
            f"The machine has a GPU that torch does not use: torch {torch.__version__} is a build "
            "without CUDA; install one with it, as https://pytorch.org says."
        ),
    ),
    "a hidden GPU": (
        _unused("13.0", ""),
        "The machine has a GPU that torch does not use: CUDA_VISIBLE_DEVICES hides it; unset it.",
    ),
    "an old driver": (
        _unused("13.0", None),
        (
            "The machine has a GPU that torch does not use: The NVIDIA driver on your system is "
            "too old (found version 12020); install a driver for CUDA 13.0 or later, and see that "
            "nvidia-smi runs."
        ),
    ),
    "a missing package": (
        _no_numpy,
        (
            "opfuser needs no-such-numpy, which is not installed. "
            "Run pip install 'no-such-numpy>=1.26'."
        ),
    ),
    "another torch": (
        _other_torch,
        (
            f"torch {metadata.version('torch')} is installed, and opfuser needs <2.4,>=2.0. "
            "Run pip install 'torch<2.4,>=2.0'."
        ),
    ),
    "a newer torch": (
        _torch_of_next_year,
        "torch 2.99.0+cu140 is installed, and the newest that opfuser was tested with is 2.15.",
    ),
    "an unknown variable": (
        lambda patch: patch.setenv("OPFUSER_DISABEL", "x"),
        "No environment variable OPFUSER_DISABEL is read; there are OPFUSER_CONFIG,",
    ),
    "an unknown fusion": (
        lambda patch: patch.setenv("OPFUSER_ENABLE", "norm_linear, foo"),
        "OPFUSER_ENABLE names 'foo', but no fusion has that name.",
    ),
}


def test_variables_that_the_library_reads_are_known() -> None:
    sources = Path(opfuser.__file__).parent.rglob("*.py")
    named = re.findall(r"OPFUSER_[A-Z_]*[A-Z]", "".join(file.read_text() for file in sources))
    assert sorted({*named}) == sorted(doctor.KNOWN_VARIABLES)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_wrong_is_a_finding(
    opfuser_command: Command, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    plant, says = PROBLEMS[problem]
    plant(monkeypatch)
    done = opfuser_command("doctor")
    assert done.status == 3
    assert says in " ".join(done.out.replace("\n", " ").split())


@pytest.mark.parametrize(
    ("version", "bounds", "inside"),
    [
        ("2.13.0+cu130", "<2.14,>=2.11", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.11", "<2.14,>=2.11.0", True),
        ("2.9.1", ">=2.11", False),
        ("10.0", ">=9.5", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_number(version: str, bounds: str, inside: bool) -> None:
    assert doctor.within(version, bounds) is inside


@pytest.mark.parametrize(
    ("architectures", "capability", "built"),
    [
        (["sm_80", "sm_90"], (8, 6), True),
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_86", "sm_90"], (8, 0), False),
        (["sm_80", "sm_90"], (12, 0), False),
        (["sm_90", "sm_90a", "sm_100", "compute_90"], (12, 0), True),
        (["sm_75", "compute_120"], (9, 0), False),
        (["gfx942"], (9, 0), False),
        ([], (9, 0), True),
    ],
)
def test_what_a_torch_is_built_for(
    architectures: list[str], capability: tuple[int, int], built: bool
) -> None:
    assert gpu_problems.is_built_for(capability, architectures) is built

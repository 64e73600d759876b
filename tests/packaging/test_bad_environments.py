"""Missing and wrong packages, and a Triton that cannot build: one sentence with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import opfuser
import opfuser.hf
from opfuser.errors import CompilerError, MissingPackageError
from opfuser.integrations.te import to_te
from opfuser.kernels.launch import Launch
from opfuser.runtime import compilers
from opfuser.runtime.libraries import required

ROOT = Path(__file__).parents[2]

OLD_TORCH = """
import torch
torch.__version__ = "2.4.1+cu121"
try:
    import opfuser
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_an_old_torch_is_refused_at_import() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", OLD_TORCH]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "TorchVersionError opfuser needs torch 2.11 or later. Received: torch 2.4.1+cu121. "
        "Run pip install --upgrade 'torch>=2.11'.\n"
    )


FEATURES: dict[str, tuple[str, Any, str]] = {
    "attention of transformers": (
        "transformers.modeling_utils",
        opfuser.hf.register_attention,
        (
            r"^opfuser\.hf\.register_attention needs transformers\.modeling_utils\."
            r"AttentionInterface\. Received: .*transformers\.modeling_utils.*\. "
            r"Run pip install 'opfuser\[hf\]'\.$"
        ),
    ),
    "layers of kernels": (
        "kernels",
        opfuser.hf.kernel_mapping,
        (
            r"^opfuser\.hf\.kernel_mapping needs kernels\.Mode\. Received: .*kernels.*\. "
            r"Run pip install 'kernels'\.$"
        ),
    ),
    "te": (
        "transformer_engine.pytorch",
        lambda: to_te(opfuser.Sequential(opfuser.GELU())),
        (
            r"^to_te needs transformer_engine\.pytorch\. Received: .*transformer_engine.*\. "
            r"Run pip install 'opfuser\[te\]'\.$"
        ),
    ),
}


@pytest.mark.parametrize(("module", "feature", "says"), FEATURES.values(), ids=list(FEATURES))
@pytest.mark.parametrize("there", [False, True], ids=["missing", "another version"])
def test_a_feature_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, feature: Any, says: str, there: bool
) -> None:
    """Also where the module is there, and has not what is needed of it."""
    if there and module.startswith("transformer_engine"):
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.ops", None)
        says = says.replace(r"pytorch\. Received", r"pytorch\.ops\. Received")
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module) if there else None)  # type: ignore[arg-type]
    with pytest.raises(MissingPackageError, match=says):
        feature()


def test_the_version_that_is_installed_is_named() -> None:
    with pytest.raises(MissingPackageError) as caught:
        required("pytest:no_such_thing", "This test", "pytest>=99")
    assert str(caught.value) == (
        f"This test needs pytest.no_such_thing. Received: pytest {pytest.__version__}, module "
        "'pytest' has no attribute 'no_such_thing'. Run pip install 'pytest>=99'."
    )
    assert required("pytest:raises", "This test", "pytest") is pytest.raises
    assert required("pytest", "This test", "pytest") is pytest


def test_a_model_that_is_not_known_is_kept_and_says_why() -> None:
    class Odd(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(super().forward(x))

    report = opfuser.apply(Odd(3, 3), example=torch.ones(2, 3, 3))
    assert str(report) == (
        "nothing is computed by opfuser\n"
        "kept as they are:\n"
        "  the model itself: computes linalg_matrix_exp"
    )


def _no_program(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PATH", "")
    patch.delenv("CC", raising=False)


def _wrong_program(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CC", "/no/such/compiler")


def _no_headers(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CC", sys.executable)
    patch.setattr(compilers.sysconfig, "get_paths", lambda: {"include": "/nowhere"})


TROUBLES = {
    "none": (
        _no_program,
        "Triton finds no C compiler: install gcc, or name one in the variable CC",
    ),
    "a wrong name": (
        _wrong_program,
        "Triton finds no C compiler: CC is '/no/such/compiler', which is no program. Unset it",
    ),
    "no headers": (
        _no_headers,
        (
            "Triton's C compiler finds no Python.h in /nowhere: install the headers of Python, "
            "python3-dev on Debian and Ubuntu"
        ),
    ),
}


@pytest.mark.parametrize(("plant", "says"), TROUBLES.values(), ids=list(TROUBLES))
def test_a_compiler_that_triton_lacks(
    monkeypatch: pytest.MonkeyPatch, plant: Any, says: str
) -> None:
    plant(monkeypatch)
    assert compilers.trouble() == says


def test_a_compiler_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilers.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", sys.executable)
    (tmp_path / "Python.h").touch()
    assert compilers.trouble() is None


def launch_that(monkeypatch: pytest.MonkeyPatch, fails: Any) -> None:
    """Launches a kernel for which Triton calls ``fails``."""
    monkeypatch.setattr("opfuser.kernels.launch.INTERPRETED", False)
    monkeypatch.setattr("torch.cuda.device", nullcontext)
    monkeypatch.setattr(Launch, "function", {(1, 1, 1): lambda *args, **options: fails()})
    Launch("nowhere:nothing", {})((1, 1, 1), (torch.ones(1),))


@pytest.mark.parametrize("plant", [_no_program, _wrong_program], ids=["none", "a wrong name"])
def test_a_launch_without_a_compiler_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, plant: Any, tmp_path: Path
) -> None:
    build = pytest.importorskip("triton.runtime.build")
    plant(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def fails() -> None:
        build.compile_module_from_src("int x;", "launcher")

    with pytest.raises(
        CompilerError, match=r"^Triton finds no C compiler: .*\(nowhere:nothing\)\.$"
    ):
        launch_that(monkeypatch, fails)


@pytest.mark.parametrize("listed", [True, False], ids=["not there", "no ldconfig"])
def test_a_launch_without_the_library_of_the_driver_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")

    def ldconfig(command: list[str]) -> bytes:
        if not listed:
            raise FileNotFoundError(2, "No such file or directory", command[0])
        return b"libcuda.so.1 (libc6,x86-64) => /no/such/folder/libcuda.so.1"

    monkeypatch.setattr(driver.subprocess, "check_output", ldconfig)
    says = (
        r"^Triton does not find libcuda\.so\.1, which comes with NVIDIA's driver: install the "
        r"driver, or name the folder in the variable TRITON_LIBCUDA_PATH \(nowhere:nothing\)\.$"
    )
    with pytest.raises(CompilerError, match=says):
        launch_that(monkeypatch, driver.libcuda_dirs.__wrapped__)


@pytest.mark.parametrize("error", [RuntimeError("out of resource"), OSError("no space left")])
def test_other_errors_of_a_launch_are_its_own(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    _no_program(monkeypatch)

    def fails() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)) as caught:
        launch_that(monkeypatch, fails)
    assert caught.value is error

"""``import opfuser`` brings in nothing heavy, and needs neither a GPU, a compiler nor triton."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import opfuser

ROOT = Path(__file__).parents[2]

LOADED = """
import json, sys
import torch
before = set(sys.modules)
import opfuser
imported = sorted(set(sys.modules) - before)
seq = opfuser.Sequential(opfuser.Linear(8, 16), opfuser.RMSNorm(16), opfuser.SwiGLU())
seq(torch.ones(3, 8)).sum().backward()
print(json.dumps([imported, sorted(sys.modules)]))
"""

# Folders count.
MOST_MODULES = 28
MOST_MODULES_OF_A_STEP = 203

USED_LATER = """
import sys
import torch
import opfuser
assert "opfuser.report" not in sys.modules
seq = opfuser.Sequential(opfuser.Linear(4, 2), opfuser.GELU())
plan = seq.plan(torch.ones(3, 4))
assert "<svg" in plan._repr_svg_() and "<" in plan._repr_html_()
assert str(plan) and plan.program
assert type(seq.to_torch()).__module__.startswith("torch.nn")
seq(torch.ones(3, 4)).sum().backward()
assert not seq.last_plan.replays
assert "opfuser.engine.replayed.replay" not in sys.modules
with opfuser.replay("on"):
    seq(torch.ones(3, 4)).sum().backward()
[replay] = seq.last_plan.replays
assert replay.refusal.code == "DEVICE"
assert "opfuser.reading" not in sys.modules
"""

RUN_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
import opfuser
x = torch.ones(3, 4, requires_grad=True)
class Cube(opfuser.PointwiseOperation):
    device_function = "not_there:cube"
    def value(self, x):
        return x**3
ops = opfuser.Linear(4, 2), opfuser.GELU(), Cube(), opfuser.SiLU(), opfuser.Dropout(0.1)
opfuser.Sequential(*ops)(x).sum().backward()
assert x.grad is not None and x.grad.isfinite().all()
"""


def run_bare(code: str) -> str:
    """Runs ``code`` in a new interpreter that sees no GPU and no program, warnings as errors."""
    env = {**os.environ, "PATH": "", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_adds_little_that_is_light_and_a_step_what_it_needs() -> None:
    new, after_a_step = json.loads(run_bare(LOADED))
    packages = {name.partition(".")[0] for name in new}
    assert packages <= {"opfuser", "torch", "typing_extensions"} | sys.stdlib_module_names
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx")
    assert [name for name in new if name.startswith(heavy)] == []
    assert sum(name.startswith("opfuser.") for name in new) <= MOST_MODULES
    assert sum(name.startswith("opfuser.") for name in after_a_step) <= MOST_MODULES_OF_A_STEP


def test_methods_load_what_they_use() -> None:
    run_bare(USED_LATER)


def read_by_type_checkers(package: ModuleType) -> dict[str, str]:
    """Names and modules of what a package imports for type checkers alone."""
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    [block] = [
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    ]
    read = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        read |= {a.name: statement.module or a.name for a in statement.names if a.name != "*"}
    return read


PACKAGES = (opfuser, opfuser.basic, opfuser.fused)


def places(package: ModuleType) -> dict[str, str]:
    """The names that load when they are used, and their modules, as type checkers read them."""
    read = {name: place for name, place in read_by_type_checkers(package).items() if name != place}
    if package is opfuser:
        read |= {name: f"basic.{place}" for name, place in places(opfuser.basic).items()}
    return read


NOT_BOUND = """
import importlib, json, torch, opfuser
names = {{}}
for package in {packages}:
    module = importlib.import_module(package)
    names[package] = sorted(set(dir(module)) - set(vars(module)))
print(json.dumps(names))
"""


@pytest.fixture(scope="module")
def not_bound() -> dict[str, list[str]]:
    """What each package offers, and has not loaded once it is imported."""
    packages = [package.__name__ for package in PACKAGES]
    found: dict[str, list[str]] = json.loads(run_bare(NOT_BOUND.format(packages=packages)))
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_names_that_load_later_are_those_that_type_checkers_read(
    package: ModuleType, not_bound: dict[str, list[str]]
) -> None:
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    read = places(package)
    assert read.keys() == {*not_bound[package.__name__]} - modules
    # Loading a module binds its name, which would hide another thing of that name.
    assert not read.keys() & modules
    for name, place in read.items():
        expected = getattr(import_module(f"{package.__name__}.{place}"), name)
        assert getattr(package, name) is expected, name


EVERY_MODULE = """
from pkgutil import iter_modules
from types import ModuleType
import opfuser
functions = "fusion", "fusion_config", "plugins"  # bound once their modules are
for name in {module.name for module in iter_modules(opfuser.__path__)} - {"__main__"}:
    assert name in dir(opfuser)
    assert isinstance(getattr(opfuser, name), ModuleType) != (name in functions), name
"""


def test_modules_are_there_without_an_import_of_their_own() -> None:
    run_bare(EVERY_MODULE)


def test_no_package_has_other_names() -> None:
    for package in PACKAGES:
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute"):
            _ = package.NotThere


def test_every_public_name_is_there_and_no_other() -> None:
    assert [name for name in opfuser.__all__ if not hasattr(opfuser, name)] == []
    assert set(opfuser.__all__) <= set(dir(opfuser))
    with pytest.raises(AttributeError, match="module 'opfuser' has no attribute 'not_there'"):
        _ = opfuser.not_there


def test_runs_without_triton_gpu_and_compiler() -> None:
    run_bare(RUN_WITHOUT_TRITON)
